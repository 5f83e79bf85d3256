"""Layers that stand for a linear layer that is split over ranks.

A layer whose output stays split needs no class of its own: it is a linear layer with fewer outputs. The two classes
here exchange tensors with the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from actors.model.tensor_parallel.group import TensorParallelGroup


class RowParallelLinear(nn.Module):
    """A linear layer that takes this rank's part of the inputs, and returns the sum of the outputs over the ranks."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, group: TensorParallelGroup) -> None:
        """in_features: of this rank. weight [out_features, in_features] and bias [out_features] are set by the loader.

        Every rank has the bias, and adds it to the sum, so that it counts once.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.add_part: Callable[[Tensor, Tensor], None] | None = None
        """A function of inputs and output; it adds to this rank's part of the output, before the parts are summed."""
        self.product: Callable[[Tensor], Tensor] | None = None
        """A function that computes this rank's part of the output, in place of weight: set when the layer is packed."""
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the whole output: [..., in_features] -> [..., out_features]."""
        part = functional.linear(inputs, self.weight) if self.product is None else self.product(inputs)
        if self.add_part is not None:
            self.add_part(inputs, part)
        output = self._group.all_reduce(part)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer that computes this rank's part of the outputs, and gathers the parts of the other ranks.

    Each output is computed by one rank, so all ranks have the same bits. Parts are of equal size; the last ones are
    padded if out_features is no multiple of the number of ranks.
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
        self.product: Callable[[Tensor], Tensor] | None = None
        """A function that computes this rank's part of the output, in place of weight: set when the layer is packed."""
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the whole output: [..., in_features] -> [..., out_features]."""
        part = functional.linear(inputs, self.weight, self.bias) if self.product is None else self.product(inputs)
        parts = self._group.all_gather(part)
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]
