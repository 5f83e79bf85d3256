"""One operator of torch for everything in a traced step that a compiler must leave as it is.

A tracer records calls of operators, and a compiler may put other code in the place of each. raypd::keep hides a call of
Python from both: the tracer sees an operator with inputs and one output, and the compiled step calls it, which then
does what it did before. So products with packed weights, norms and attention keep their bits, and attention reads the
batch of the step that runs rather than of the step that was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, library

Call = Callable[..., Tensor]
"""A function of tensors, the inputs of one call of the operator."""

_NAME: Final = "raypd::keep"
_running: list[KeptCalls] = []
"""The step that is being traced, compiled or computed; steps do not overlap, since one thread computes them."""


class KeptCalls:
    """The kept calls of one traced step, by the numbers that the operator gets."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._shapes: list[Call] = []

    def __len__(self) -> int:
        """Return the number of calls that a step makes."""
        return len(self._calls)

    def keep(self, call: Call, shape: Call, *tensors: Tensor) -> Tensor:
        """Keep a call while a step is traced, and record it.

        call:  computes the output; shape: returns an empty tensor with the output's shape, strides and dtype
        """
        self._calls.append(call)
        self._shapes.append(shape)
        output: Tensor = torch.ops.raypd.keep.default(list(tensors), len(self._calls) - 1)
        return output

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the operator find these calls."""
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()

    def compute(self, tensors: Sequence[Tensor], index: int) -> Tensor:
        """Do what the call with this number does."""
        return self._calls[index](*tensors)

    def output_of(self, tensors: Sequence[Tensor], index: int) -> Tensor:
        """Return an empty tensor like the output of the call with this number."""
        return self._shapes[index](*tensors)


library.define(_NAME, "(Tensor[] tensors, int index) -> Tensor")


@library.impl(_NAME, "CPU")
def _keep(tensors: Sequence[Tensor], index: int) -> Tensor:
    return _running[-1].compute(tensors, index)


@library.register_fake(_NAME)  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _keep_fake(tensors: Sequence[Tensor], index: int) -> Tensor:
    return _running[-1].output_of(tensors, index)
