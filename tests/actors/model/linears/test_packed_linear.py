"""Several layers that take their outputs from one product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from actors.model.linears import onednn
from actors.model.linears.packed_linear import FusedProduct, PackedProduct

SIZES = (8, 4, 4)
WEIGHT = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Product:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        return functional.linear(inputs, WEIGHT)


def expected(inputs: Tensor) -> list[Tensor]:
    return [functional.linear(inputs, weight) for weight in WEIGHT.split(SIZES)]  # type: ignore[no-untyped-call]  # torch's


def drawn(seed: int) -> Tensor:
    return torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(seed))


def test_layers_with_the_same_inputs_are_computed_once() -> None:
    product, inputs = Product(), drawn(1)
    fused = FusedProduct(product, SIZES)

    for _ in range(2):
        parts = [fused.part(inputs, index) for index in range(3)]
        assert all(torch.allclose(part, own) for part, own in zip(parts, expected(inputs), strict=True))
    assert product.num_calls == 2


def test_a_layer_with_inputs_of_its_own_gets_its_own_outputs() -> None:
    product = Product()
    fused = FusedProduct(product, SIZES)
    fused.part(drawn(1), 0)

    assert torch.allclose(fused.part(drawn(2), 1), expected(drawn(2))[1])
    assert product.num_calls == 2


def test_the_same_tensor_with_other_numbers_is_computed_again() -> None:
    fused, inputs = FusedProduct(Product(), SIZES), drawn(1)
    fused.part(inputs, 0)
    inputs.copy_(drawn(2))

    # The forward before ended in an error, and this is the next one.
    assert torch.allclose(fused.part(inputs, 0), expected(drawn(2))[0])
    assert torch.allclose(fused.part(inputs, 1), expected(drawn(2))[1])


def test_what_an_adapter_writes_reaches_no_other_layer_and_no_later_call() -> None:
    fused, inputs = FusedProduct(Product(), SIZES), drawn(1)

    fused.part(inputs, 0).fill_(7)
    fused.part(inputs, 1).fill_(7)

    assert torch.allclose(fused.part(inputs, 2), expected(inputs)[2])
    assert torch.allclose(fused.part(inputs, 1), expected(inputs)[1])


def test_a_part_can_be_viewed_as_rows() -> None:
    fused, inputs = FusedProduct(Product(), SIZES), drawn(1)

    assert fused.part(inputs, 0).view(-1, SIZES[0]).shape == (3, SIZES[0])


def test_nothing_is_kept_once_every_layer_has_its_outputs() -> None:
    fused, inputs = FusedProduct(Product(), SIZES), drawn(1)
    for index in range(3):
        fused.part(inputs, index)

    assert fused._inputs is None
    assert not fused._parts


def test_few_numbers_of_rows_are_computed_since_code_is_generated_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    product = PackedProduct(WEIGHT, None, pairs_single_rows=False)
    multiply = onednn.multiply

    def count(inputs: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        computed.append(inputs.numel() // inputs.shape[-1])
        return multiply(inputs, reordered, bias)

    monkeypatch.setattr(onednn, "multiply", count)
    inputs = torch.randn(1, 2048, 6, generator=torch.Generator().manual_seed(4))
    expected = multiply(inputs, product._weight, None)
    for num_rows in range(2049):
        assert torch.equal(product(inputs[:, :num_rows]), expected[:, :num_rows]), num_rows

    assert len(set(computed)) <= 1 + 16 * 8
    assert all(wanted <= given <= wanted * 17 / 16 for wanted, given in enumerate(computed))
    assert computed[:33] == list(range(33))


def test_no_more_rows_are_computed_at_once_than_a_block_has(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    bias = torch.randn(len(WEIGHT), generator=torch.Generator().manual_seed(5))
    product, multiply = PackedProduct(WEIGHT, bias, pairs_single_rows=False, most_rows=32), onednn.multiply

    def count(inputs: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        computed.append(inputs.numel() // inputs.shape[-1])
        return multiply(inputs, reordered, bias)

    monkeypatch.setattr(onednn, "multiply", count)
    inputs = torch.randn(2, 100, 6, generator=torch.Generator().manual_seed(4))
    for num_rows, blocks in ((0, [0]), (1, [2]), (16, [32]), (17, [32, 2]), (100, [32] * 6 + [8])):
        computed.clear()
        outputs = product(inputs[:, :num_rows])
        assert outputs.shape == (2, num_rows, len(WEIGHT))
        assert outputs.is_contiguous()
        assert torch.allclose(outputs, functional.linear(inputs[:, :num_rows], WEIGHT, bias), atol=1e-5)
        assert computed == blocks


def test_a_single_row_that_is_computed_twice_keeps_its_shape() -> None:
    product = PackedProduct(WEIGHT, None, pairs_single_rows=True)

    for shape in ((6,), (1, 6), (1, 1, 6)):
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        assert torch.allclose(product(inputs), functional.linear(inputs, WEIGHT), atol=1e-5)
        assert product(inputs).shape == (*shape[:-1], 16)
    assert product(torch.zeros(1, 0, 6)).shape == (1, 0, 16)
