"""oneDNN's product with a weight that is reordered once, through torch's private operators.

torch reorders a plain weight at every call, or computes with it as it lies. The operators here are what torch's own
compiler uses for frozen weights; nothing promises that they stay, so each data type is tried before it is used, and so
is each shape: does a row's result depend on how many rows there are?

The operator takes a plain weight, too, and reads it where it is: that needs no copy, and more time.
"""

from __future__ import annotations

import enum
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK_ROWS: Final = 32
_TRIED_ROWS: Final = (1, 3, 4, 16, 17, _BLOCK_ROWS, 64, 256)
"""The numbers of rows that are compared with two rows."""
_MAX_TRIED_OUTPUTS: Final = 4096
"""A trial's weight has no more rows than this, for the sake of time: the order of a sum depends on its length."""
_MAX_ERROR: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative to the largest result."""


class RowResults(enum.Enum):
    """Says what a row's result depends on, for one shape of weights."""

    INDEPENDENT = enum.auto()
    """Every number of rows gives a row the same bits."""
    INDEPENDENT_FROM_TWO = enum.auto()
    """A row alone is summed in another order; with two rows and more every row has the same bits."""
    INDEPENDENT_IN_BLOCKS = enum.auto()
    """Up to 32 rows every row has the same bits, and others with more: so it is with AMX tiles on some processors."""
    DEPENDENT = enum.auto()
    """The number of rows changes a row's bits."""

    @property
    def most_rows(self) -> int | None:
        """The most rows to compute at once, so that their number does not matter; None: any number."""
        return _BLOCK_ROWS if self is RowResults.INDEPENDENT_IN_BLOCKS else None


def reorder_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight, [out_features, in_features], in oneDNN's order, which only multiply() reads."""
    # The second argument is the number of rows to expect; it changes neither the order nor the time (measured).
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)
    return reordered


def rounded_rows(num_rows: int) -> int:
    """Return how many rows to compute for a number of rows: itself up to 32, then at most a sixteenth more.

    oneDNN generates code for every number of rows and shape of weights, and keeps it: about half a MiB each. Chunks of
    prompts have any number of rows, so without this an engine grows by hundreds of MiB while it serves.
    """
    step: int = 1 << max(0, num_rows.bit_length() - 5)
    return -(-num_rows // step) * step


def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs times the transposed weight, plus bias: [..., in_features] -> [..., out_features], contiguous.

    weight: reordered by reorder_weight(), or plain and contiguous
    """
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return output


@torch.inference_mode()
def reason_against(dtype: torch.dtype) -> str | None:
    """Return why weights of this data type cannot be reordered on this machine, or None if they can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return "torch was built without oneDNN"
    if dtype not in _MAX_ERROR:
        return f"oneDNN computes with float32, bfloat16 and float16, not with {dtype}"
    weight, inputs, bias = (torch.randn(shape, generator=_drawn()).to(dtype) for shape in ((48, 80), (3, 80), (48,)))
    try:
        result = multiply(inputs, reorder_weight(weight), bias)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        return f"torch's operator says: {str(error).splitlines()[0]}"
    if not is_close(result, functional.linear(inputs.float(), weight.float(), bias.float())):
        return "torch's operator gives other results than a plain product"
    return None


def is_close(result: Tensor, expected: Tensor) -> bool:
    """Whether two products are the same but for rounding, by the data type of the first."""
    if result.shape != expected.shape:
        return False
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= _MAX_ERROR[result.dtype] * expected.abs().max().float())  # false for NaN


@torch.inference_mode()
def try_rows(
    in_features: int, out_features: int, dtype: torch.dtype, *, has_bias: bool, is_reordered: bool = True
) -> RowResults:
    """Compute with a weight of this shape and with several numbers of rows, and compare the rows.

    is_reordered: whether the weight is in oneDNN's order, and not plain
    The answer holds for the number of threads that torch has now.
    """
    num_outputs, half = min(out_features, _MAX_TRIED_OUTPUTS), in_features // 2
    generator = _drawn()
    # The second half of the inputs takes back, in another order, what the first half adds. So what is left is the sum's
    # rounding, and any other order of the sum gives other bits.
    weight = torch.randn(num_outputs, in_features, generator=generator)
    inputs = torch.randn(max(_TRIED_ROWS), in_features, generator=generator)
    order = torch.randperm(half, generator=generator)
    weight[:, half : 2 * half], inputs[:, half : 2 * half] = -weight[:, order], inputs[:, order]
    bias = torch.zeros(num_outputs, dtype=dtype) if has_bias else None
    weight, inputs = weight.to(dtype), inputs.to(dtype)
    if is_reordered:
        weight = reorder_weight(weight)
    two = torch.cat([multiply(inputs[first : first + 2], weight, bias) for first in (0, 2)])
    differing = [
        rows for rows in _TRIED_ROWS if not torch.equal(multiply(inputs[:rows], weight, bias)[:4], two[: min(rows, 4)])
    ]
    if not differing:
        return RowResults.INDEPENDENT
    if differing == [1]:
        return RowResults.INDEPENDENT_FROM_TWO
    return RowResults.INDEPENDENT_IN_BLOCKS if min(differing) > _BLOCK_ROWS else RowResults.DEPENDENT


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)
