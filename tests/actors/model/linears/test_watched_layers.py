"""A trial forward finds the layers that are packed, and those of them that are one product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from actors.model.linears.watched_layers import find_layers, find_tied_layers


class OtherLinear(nn.Linear):
    """Such as a quantized layer."""


class Layer(nn.Module):
    """Has a few linear layers, and a forward that a test gives."""

    def __init__(self, compute: Callable[[Layer, Tensor], object]) -> None:
        super().__init__()
        self.compute = compute
        self.q, self.k, self.v = (nn.Linear(6, size, bias=False) for size in (8, 4, 4))
        self.out = nn.Linear(8, 6)

    def forward(self, inputs: Tensor) -> None:
        self.compute(self, inputs)


def find(compute: Callable[[Layer, Tensor], object], change: Callable[[Layer], object] = id) -> list[list[str]]:
    """The names of the layers found in a model that computes this."""
    model = nn.ModuleDict({"layer": Layer(compute)})
    layer = model["layer"]
    assert isinstance(layer, Layer)
    change(layer)
    modules = dict(model.named_modules(remove_duplicate=False))
    groups = find_layers(model, lambda: layer(torch.randn(1, 3, 6)))
    assert dict(model.named_modules(remove_duplicate=False)) == modules, "the model is as it was"
    return [["+".join(name.removeprefix("layer.") for name in found.names) for found in group] for group in groups]


def test_layers_that_take_the_same_tensor_are_one_group() -> None:
    assert find(lambda m, x: (m.q(x), m.k(x), m.v(x), m.out(m.q.weight.new_ones(8)))) == [["k", "v"], ["out"]]
    assert find(lambda m, x: (m.q(x), m.k(x), m.v(x), m.out(torch.ones(8)))) == [["q", "k", "v"], ["out"]]


def test_equal_numbers_in_another_tensor_are_not_the_same_inputs() -> None:
    assert find(lambda m, x: (m.q(x), m.k(x.clone()), m.v(x[:]))) == [["q"], ["k"], ["v"]]


def test_inputs_that_change_between_two_layers_are_not_the_same() -> None:
    assert find(lambda m, x: (m.q(x), m.k(x), x.add_(1), m.v(x))) == [["q", "k"], ["v"]]


def test_layers_with_another_one_between_them_are_not_one_group() -> None:
    assert find(lambda m, x: (m.q(x), m.out(torch.ones(8)), m.k(x))) == [["q"], ["out"], ["k"]]


def test_a_layer_that_is_called_twice_is_packed_alone() -> None:
    assert find(lambda m, x: (m.q(x), m.k(x), m.k(x))) == [["q"], ["k"]]


def test_layers_of_which_only_one_has_a_bias_are_not_one_group() -> None:
    def add_bias(layer: Layer) -> None:
        layer.k = nn.Linear(6, 4)

    assert find(lambda m, x: (m.q(x), m.k(x), m.v(x)), add_bias) == [["q"], ["k"], ["v"]]


def test_layers_of_different_modules_are_not_one_group() -> None:
    def move_to_another_module(layer: Layer) -> None:
        layer.mlp = nn.ModuleDict({"up": layer.k})
        del layer.k

    found = find(lambda m, x: (m.q(x), m.get_submodule("mlp.up")(x), m.v(x)), move_to_another_module)
    assert found == [["q"], ["mlp.up"], ["v"]]


def test_a_layer_whose_weight_the_model_reads_is_left_alone() -> None:
    assert find(lambda m, x: (m.q(x), m.k(x.to(m.k.weight.dtype)))) == [["q"]]


def test_a_layer_that_is_not_called_is_left_alone() -> None:
    assert find(lambda m, x: m.q(x)) == [["q"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "k", OtherLinear(6, 4)),
        lambda layer: layer.k.register_forward_hook(lambda *call: None),
        lambda layer: setattr(layer.k, "weight", layer.v.weight),
        lambda layer: setattr(layer.k, "weight", nn.Parameter(torch.empty(4, 6, device="meta"))),
    ],
    ids=["subclass", "hook", "shared weight", "no weight in memory"],
)
def test_unusual_layers_are_left_alone(change: Callable[[Layer], object]) -> None:
    devices: list[torch.device] = []

    def change_and_look(layer: Layer) -> None:
        change(layer)
        devices.append(layer.k.weight.device)  # A model that reads it has the layer left alone for that alone.

    found = find(lambda m, x: (m.q(x), m.k(x.to(devices[0])), m.out(torch.ones(8))), change_and_look)
    assert found == [["q"], ["out"]]


def test_a_layer_in_two_places_is_found_once_with_both_names() -> None:
    def share(layer: Layer) -> None:
        layer.v = layer.k

    assert find(lambda m, x: (m.q(x), m.k(x), m.v(x)), share) == [["q"], ["k+v"]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (id, [("output",)]),
        (lambda model: setattr(model, "also", model.output), [("output", "also")]),
        (lambda model: setattr(model.other, "weight", model.output.weight), []),
        (lambda model: setattr(model, "output", nn.Linear(6, 8)), []),
        (lambda model: model.output.register_forward_hook(lambda *call: None), []),
    ],
    ids=["tied", "in two places", "another layer has it too", "its own weight", "with a hook"],
)
def test_a_layer_that_has_the_weight_of_the_embeddings_is_tied(
    change: Callable[[nn.ModuleDict], object], expected: list[tuple[str, ...]]
) -> None:
    model = nn.ModuleDict({"embeddings": nn.Embedding(8, 6), "output": nn.Linear(6, 8), "other": nn.Linear(6, 8)})
    embeddings, output = model["embeddings"], model["output"]
    assert isinstance(embeddings, nn.Embedding)
    assert isinstance(output, nn.Linear)
    output.weight = embeddings.weight
    change(model)
    assert [found.names for found in find_tied_layers(model)] == expected


def test_a_model_that_fails_is_as_it_was() -> None:
    model = Layer(lambda m, x: m.out(x))
    before = dict(model.named_modules())

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_layers(model, lambda: model(torch.randn(2, 6)))

    assert dict(model.named_modules()) == before
