"""Layers that stand for a linear layer that is split over ranks.

A layer whose output is split needs nothing: it is a linear layer with fewer outputs. The two here talk to the others.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from actors.model.tensor_parallel.group import TensorParallelGroup


class RowParallelLinear(nn.Module):
    """Takes this rank's part of the inputs, and returns the whole output: the sum over the ranks."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, group: TensorParallelGroup) -> None:
        """in_features: of this rank. weight [out_features, in_features] and bias [out_features] are set by the loader.

        The bias is every rank's, and is added once, to the sum.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.add_part: Callable[[Tensor, Tensor], None] | None = None
        """A function of inputs and output; it adds to this rank's part of the output, before the parts are summed."""
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the whole output: [..., in_features] -> [..., out_features]."""
        part = functional.linear(inputs, self.weight)
        if self.add_part is not None:
            self.add_part(inputs, part)
        output = self._group.all_reduce(part)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """Computes this rank's part of the outputs and gathers the others': each is computed once, so all ranks agree.

    Parts are of equal size, the last one padded where out_features is no multiple of the ranks.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, group: TensorParallelGroup) -> None:
        """out_features: of all ranks together. weight [part, in_features] and bias [part] are set by the loader."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the whole output: [..., in_features] -> [..., out_features]."""
        parts = self._group.all_gather(functional.linear(inputs, self.weight, self.bias))
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]
