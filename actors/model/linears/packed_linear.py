"""Linear layers that compute with oneDNN's operator, each alone or several as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from actors.model.linears import onednn

Product = Callable[[Tensor], Tensor]
"""A function of inputs, [..., in_features], that returns outputs, [..., out_features]."""


class PackedProduct:
    """Multiplies by one weight with oneDNN's operator, and adds a bias."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        pairs_single_rows: bool,
        most_rows: int | None = None,
        is_reordered: bool = True,
    ) -> None:
        """Take a weight, [out_features, in_features], and a bias, [out_features].

        pairs_single_rows: compute a row that comes alone twice, since two rows are summed in another order than one
        most_rows: compute more rows in blocks of this many, since more would be summed in another order
        is_reordered: compute with a copy in oneDNN's order, and do not keep the plain weight; otherwise the plain
            weight, which has to be contiguous, is read where it is
        """
        self._weight = onednn.reorder_weight(weight) if is_reordered else weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._pairs_single_rows = pairs_single_rows
        self._most_rows = most_rows

    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute [..., in_features] -> [..., out_features], contiguous."""
        num_rows = inputs.numel() // inputs.shape[-1]
        if self._most_rows is not None and num_rows > self._most_rows:
            blocks = torch.split(inputs.reshape(num_rows, -1), self._most_rows)
            outputs = torch.cat([onednn.multiply(block, self._weight, self._bias) for block in blocks])
            return outputs.view(*inputs.shape[:-1], -1)
        if self._pairs_single_rows and num_rows == 1:
            pair = inputs.reshape(1, -1).expand(2, -1)
            return onednn.multiply(pair, self._weight, self._bias)[:1].view(*inputs.shape[:-1], -1)
        if num_added := onednn.rounded_rows(num_rows) - num_rows:
            rows = functional.pad(inputs.reshape(num_rows, -1), (0, 0, 0, num_added))
            return onednn.multiply(rows, self._weight, self._bias)[:num_rows].view(*inputs.shape[:-1], -1)
        return onednn.multiply(inputs, self._weight, self._bias)


class FusedProduct:
    """One product for several linear layers that take the same inputs.

    The first of them computes the outputs of all, and the others find theirs here. A layer that comes with inputs of
    its own computes again, so the outputs are right whatever the order of the calls. Not thread-safe: a model's
    forwards follow each other.

    Invariant: _parts are the outputs for _inputs that no layer has taken yet. Each is handed out once, so that a layer
    may write into its part, as adapters do.
    """

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        """product: of the weights below each other; sizes: how many outputs each layer has, in the order of calls."""
        self._product = product
        self._sizes = list(sizes)
        self._inputs: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, inputs: Tensor, index: int) -> Tensor:
        """Return the outputs of the layer with this index, [..., sizes[index]]: a view, with gaps between its rows."""
        # The first layer always computes: its inputs may be the tensor of an earlier step, with other numbers in it.
        if index == 0 or inputs is not self._inputs or index not in self._parts:
            self._parts = dict(enumerate(torch.split(self._product(inputs), self._sizes, -1)))
            self._inputs = inputs
        part = self._parts.pop(index)
        if not self._parts:
            self._inputs = None
        return part


class PackedLinear(nn.Module):
    """Stands for a linear layer. It has no attribute `weight`, since nothing but the product can read that memory."""

    def __init__(self, in_features: int, out_features: int, product: Product) -> None:
        """product: computes this layer's outputs."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._product = product

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute [..., in_features] -> [..., out_features]."""
        return self._product(inputs)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TiedLinear(nn.Linear):
    """Stands for an output layer whose weight is the embeddings', so it stays plain and has its name in the model."""

    def __init__(self, layer: nn.Linear, product: Product) -> None:
        """layer: the layer that this one replaces, whose weight and bias it takes; product: computes its outputs."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._product = product

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute [..., in_features] -> [..., out_features]."""
        return self._product(inputs)
