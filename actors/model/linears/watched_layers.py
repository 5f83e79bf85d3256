"""Finds the linear layers of a model that can be packed, and those of them that take the same inputs.

A trial forward decides, since a model's code cannot be read: whether a layer is called, whether anything but its own
product reads its weight, and whether the layers beside it get the very same tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.tensor_parallel.split_layers import GatheredLinear, RowParallelLinear
from kv_transfer.device_kind import is_accelerator

PackableLayer = nn.Linear | RowParallelLinear | GatheredLinear


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A layer to pack. names: where it is in the model; several if its weights are several layers'"""

    names: tuple[str, ...]
    layer: PackableLayer

    @property
    def product_bias(self) -> Tensor | None:
        """The bias that is added within the layer's product."""
        # The bias of a layer that is split by its inputs is added once, to the sum over the ranks.
        return None if isinstance(self.layer, RowParallelLinear) else self.layer.bias


@dataclass(slots=True, eq=False)
class _Calls:
    """Records what a trial forward showed of one layer.

    names:  see FoundLayer
    inputs: of each call, with how often the tensor had been changed by then
    is_read: whether anything but its own product reads its weight or bias
    """

    layer: PackableLayer
    names: list[str] = field(default_factory=list)
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    is_read: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the layer can be replaced by one that has no weight to read."""
        return not self.is_read and all(inputs.dtype == self.layer.weight.dtype for inputs, _ in self.inputs)


class _WatchedLayer(nn.Module):
    """Stands for a layer during the trial forward, and writes down how it is used."""

    def __init__(self, calls: _Calls, order: list[_Calls]) -> None:
        super().__init__()
        self._calls = calls
        self._order = order

    def forward(self, inputs: Tensor) -> Tensor:
        self._calls.inputs.append((inputs, inputs._version))
        self._order.append(self._calls)
        output: Tensor = self._calls.layer(inputs)
        return output

    def __getattr__(self, name: str) -> Any:  # whatever the layer has
        calls: _Calls = self.__dict__["_calls"]
        calls.is_read |= name in ("weight", "bias")
        return getattr(calls.layer, name)


def find_layers(model: nn.Module, run: Callable[[], None]) -> list[list[FoundLayer]]:
    """Run a trial forward, and return the layers to pack, in groups that take the same inputs.

    run: computes a few tokens; it raises whatever the forward raises, and the model is as it was then
    A group has the layers of one parent module that follow each other with the same unchanged tensor, each called once.
    """
    watched: dict[int, _Calls] = {}
    for name, layer in _packable(model):
        watched.setdefault(id(layer), _Calls(layer)).names.append(name)
    order: list[_Calls] = []
    with _watching(model, list(watched.values()), order), torch.no_grad():
        run()
    groups: list[list[_Calls]] = []
    for index, calls in enumerate(order):
        if calls in order[:index]:
            continue
        if index and groups[-1][-1] is order[index - 1] and _may_share_a_product(groups[-1][-1], calls):
            groups[-1].append(calls)
        else:
            groups.append([calls])
    found = [[FoundLayer(tuple(calls.names), calls.layer) for calls in group if calls.is_usual] for group in groups]
    return [group for group in found if group]


def _may_share_a_product(one: _Calls, other: _Calls) -> bool:
    if len(one.inputs) != 1 or len(other.inputs) != 1 or len(one.names) != 1 or len(other.names) != 1:
        return False
    (inputs, version), (other_inputs, other_version) = one.inputs[0], other.inputs[0]
    return (
        isinstance(one.layer, nn.Linear)
        and isinstance(other.layer, nn.Linear)
        and inputs is other_inputs
        and version == other_version
        and one.names[0].rpartition(".")[0] == other.names[0].rpartition(".")[0]
        and (one.layer.bias is None) == (other.layer.bias is None)
    )


def find_tied_layers(model: nn.Module) -> list[FoundLayer]:
    """Return the output layers whose weight is that of the embeddings, and of no other module."""
    embeddings = {module.weight.data_ptr(): module for module in model.modules() if isinstance(module, nn.Embedding)}
    owners = _owners(model)
    found: dict[int, FoundLayer] = {}
    for name, layer in _usual_layers(model):
        pointer = layer.weight.data_ptr()
        is_tied = pointer in embeddings and owners[pointer] == 2
        if is_tied and type(layer) is nn.Linear and layer.weight.is_contiguous():
            names = found[id(layer)].names if id(layer) in found else ()
            found[id(layer)] = FoundLayer((*names, name), layer)
    return list(found.values())


def _packable(model: nn.Module) -> Iterator[tuple[str, PackableLayer]]:
    """Yield linear layers by name whose weight is a plain tensor on the CPU that no other module has."""
    owners = _owners(model)
    return ((name, layer) for name, layer in _usual_layers(model) if owners[layer.weight.data_ptr()] == 1)


def _owners(model: nn.Module) -> Counter[int]:
    """Count the modules that have each parameter, by the address of its numbers."""
    # A quantized weight of another class may have no memory of its own.
    return Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if type(parameter) is nn.Parameter
    )


def _usual_layers(model: nn.Module) -> Iterator[tuple[str, PackableLayer]]:
    """Yield linear layers by name whose weight is a plain tensor on the CPU."""
    for name, module in model.named_modules(remove_duplicate=False):
        # Subclasses of nn.Linear compute something else: quantized weights, other dtypes. So do layers with a forward
        # of their own, such as those that round their inputs first.
        is_usual = type(module) in (nn.Linear, RowParallelLinear, GatheredLinear) and "forward" not in vars(module)
        if not is_usual or not name:
            continue
        assert isinstance(module, PackableLayer)
        weight = module._parameters.get("weight")
        if (
            type(weight) is nn.Parameter
            and not is_accelerator(weight.device)
            and weight.layout == torch.strided
            and weight.ndim == 2
            and weight.numel()
            and not (module._forward_hooks or module._forward_pre_hooks)
        ):
            yield name, module


@contextmanager
def _watching(model: nn.Module, watched: list[_Calls], order: list[_Calls]) -> Iterator[None]:
    for calls in watched:
        replace_module(model, calls.names, _WatchedLayer(calls, order))
    try:
        yield
    finally:
        for calls in watched:
            replace_module(model, calls.names, calls.layer)


def replace_module(model: nn.Module, names: list[str] | tuple[str, ...], module: nn.Module) -> None:
    """Put a module in the place of another one, everywhere where the model has that."""
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
