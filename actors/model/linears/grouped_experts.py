"""Computes the experts of a mixture in groups where transformers' module would loop over them.

transformers sorts tokens by expert and multiplies once (grouped_mm), but not in these families: LongCat-Flash and DBRX
loop over the experts that were chosen, and ask the device for their numbers; JetMoE loops over all experts. Their
modules get a forward that does the same in groups. The rest of the model, and its weights, are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_mm

_Forward = Callable[..., Tensor]


def group_experts(model: nn.Module) -> int:
    """Let the modules that loop over experts compute them in groups. Returns how many modules there are."""
    modules = _looping_modules(model)
    for module in modules:
        setattr(module, "forward", partial(_FORWARDS[type(module).__name__], module))  # noqa: B010  # untyped
    return len(modules)


@contextmanager
def looping_experts(model: nn.Module) -> Iterator[None]:
    """Let the modules compute with transformers' own forward until the context ends."""
    replaced = [module for module in _looping_modules(model) if "forward" in vars(module)]
    own = [vars(module).pop("forward") for module in replaced]
    try:
        yield
    finally:
        for module, forward in zip(replaced, own, strict=True):
            setattr(module, "forward", forward)  # noqa: B010  # untyped


def _looping_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in _FORWARDS]


def _longcat_flash(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Some experts return their inputs: the ones with the highest numbers, so their tokens come last.

    hidden_states: [num_tokens, hidden]; top_k_index, top_k_weights: [num_tokens, top_k]. Returns [num_tokens, hidden].
    """
    experts, order = torch.sort(top_k_index.reshape(-1))
    states = hidden_states[order // top_k_index.shape[1]]
    # Under tensor parallelism this module's hook leaves a rank its share.
    results = module.identity_expert(states)
    if (num_routed := module.num_routed_experts) > 0:
        ends = _ends(experts, num_routed)
        first, second = _product(states, module.gate_up_proj[:num_routed], ends).chunk(2, dim=-1)
        routed = _product(module.act_fn(first) * second, module.down_proj, ends)
        # Rows behind the last group hold anything.
        results = torch.where((experts < num_routed)[:, None], routed, results)
    return _sum_by_token(results, order, top_k_weights).to(hidden_states.dtype)


def _dbrx(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """See _longcat_flash(); the weights of all experts are one matrix, [num_experts * features, hidden]."""
    batch_size, states = hidden_states.shape[0], hidden_states.reshape(-1, module.hidden_size)
    experts, order = torch.sort(top_k_index.reshape(-1))
    states, ends = states[order // top_k_index.shape[1]], _ends(experts, module.num_experts)
    w1, v1, w2 = (
        weight.view(module.num_experts, module.ffn_hidden_size, module.hidden_size)
        for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2)
    )
    inner = module.mlp.activation_fn(_product(states, w1, ends)) * _product(states, v1, ends)
    results = _product(inner, w2.transpose(1, 2), ends)
    return _sum_by_token(results, order, top_k_weights).view(batch_size, -1, module.hidden_size)


def _jetmoe(module: Any, inputs: Tensor, expert_size: list[int]) -> Tensor:
    """inputs: [n, input_size], sorted by expert; expert_size: rows of each expert. Returns [n, output_size]."""
    ends = torch.tensor(expert_size, device=inputs.device).cumsum(0, dtype=torch.int32)
    return _product(inputs, module.weight, ends)


_FORWARDS: Final[dict[str, _Forward]] = {
    "LongcatFlashExperts": _longcat_flash,
    "DbrxExperts": _dbrx,
    "JetMoeParallelExperts": _jetmoe,
}
"""The replaced forwards by the names of transformers' classes."""


def _ends(experts: Tensor, num_experts: int) -> Tensor:
    """Return where each expert's rows end, [num_experts] int32. experts: [n], sorted"""
    return torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)


def _product(states: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows. states: [n, in]; weight: [num_experts, out, in]; returns [n, out]."""
    product: Tensor = _grouped_mm(states, weight.transpose(1, 2), ends)
    return product


def _sum_by_token(results: Tensor, order: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weigh and add the results of each token's experts: [num_tokens * top_k, hidden] to [num_tokens, hidden]."""
    num_tokens, top_k = top_k_weights.shape
    weighted = results * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighted[back].view(num_tokens, top_k, -1).sum(dim=1)
