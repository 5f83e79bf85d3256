"""Records a step of one token as a graph of torch's operators, without transformers' modules.

The model runs once on tensors without numbers. What has to keep its bits is kept as a call (kept_calls.py): linear
layers, norms and attention. Everything else becomes operators, which a compiler may fuse. A model whose Python looks at
numbers cannot be traced: torch raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from actors.model.attention.batch_attention import AttentionLayer, BatchAttention
from actors.model.compiled.kept_calls import KeptCalls
from actors.model.forward import FlatForward

_FUNCTIONS: Final = {
    getattr(torch.ops.aten, name).default for name in ("cos", "sin", "exp", "log", "tanh", "erf", "sigmoid", "gelu")
}
"""Functions of one tensor that are kept."""


class TracedBatch:
    """Stands for any step's batch: each layer attends with the batch that current() returns. Is a BatchAttention."""

    def __init__(self, kept: KeptCalls) -> None:
        self._kept = kept
        self.current: BatchAttention | None = None
        """The batch of the step that is computed."""

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See BatchAttention."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            assert self.current is not None
            return self.current.attend(layer, query, key, value, sinks)

        return self._kept.keep(attend, _attention_output, query, key, value)


def trace_one_token(forward: FlatForward, batch: TracedBatch, kept: KeptCalls) -> GraphModule:
    """Trace a step of one token: (input_ids, positions, indices) -> logits, all for one token.

    Raises RuntimeError or TypeError for a model that cannot be traced.
    """

    def step(input_ids: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
        with _Keeping(kept):
            return forward(input_ids, positions, batch, indices)

    trace = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    with kept.running(), _kept_modules(forward.model, kept):
        graph: GraphModule = trace(*example_inputs())
    graph.graph.eliminate_dead_code()
    return graph


def example_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's token, its position, and the index of the token whose logits are wanted."""
    token, position, index = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    return token, position, index


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its class untyped
    """Keeps oneDNN's products, whose weights nothing but their operator reads, and functions such as cos.

    torch computes the latter by one library of vectorized functions, and a compiler by another, which rounds otherwise.
    """

    def __init__(self, kept: KeptCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep a call, or do what it does."""
        kwargs = kwargs or {}
        if func is torch.ops.mkldnn._linear_pointwise.default:
            inputs, weight, *others = args
            call = partial(_multiply, weight=weight, others=others)
            return self._kept.keep(call, partial(_rows_of, size=weight.shape[0]), inputs)
        if func in _FUNCTIONS:
            return self._kept.keep(partial(func, **kwargs), torch.empty_like, *args)
        return func(*args, **kwargs)


def _multiply(inputs: Tensor, weight: Tensor, others: list[Any]) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, weight, *others)
    return output


def _rows_of(inputs: Tensor, size: int) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], size))


def _attention_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    num_heads, num_tokens, _ = query.shape
    return query.new_empty((num_tokens, num_heads, value.shape[2]))


@contextmanager
def _kept_modules(model: nn.Module, kept: KeptCalls) -> Iterator[None]:
    """Keep the plain linear layers and the norms of a model while it is traced."""
    modules = [module for module in model.modules() if _is_kept(module)]
    for module in modules:
        # An attribute of the module hides the class's function.
        module.forward = partial(_keep_module, kept, module.forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _is_kept(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__.endswith("Norm")


def _keep_module(kept: KeptCalls, forward: Any, module: nn.Module, inputs: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return kept.keep(forward, partial(_rows_of, size=module.out_features), inputs)
    return kept.keep(forward, _dense_like, inputs)


def _dense_like(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)
