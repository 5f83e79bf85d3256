"""Finds the layers of a model that adapters may change, and the part of them that a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actors.model.attention_modules.latent import is_absorbed
from actors.model.linears.packed_linear import PackedLinear
from actors.model.tensor_parallel.part import SplitLinear
from actors.model.tensor_parallel.plan import Split
from actors.model.tensor_parallel.split_layers import RowParallelLinear


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear layer. in_features, out_features: of the whole layer; inputs, outputs: this rank's part of them."""

    layer: nn.Module
    in_features: int
    out_features: int
    inputs: range
    outputs: range


def find_targets(model: PreTrainedModel, split: Mapping[str, SplitLinear]) -> dict[str, LoraTarget]:
    """Return every linear layer of the decoder's stack by the name that PEFT gives it.

    Left out are the output layer, which computes only a few of a step's tokens, layers whose outputs are gathered from
    all ranks, layers that hold the weights of several experts in one tensor, those that choose the experts, and those
    that latent attention absorbs.
    """
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]  # left untyped
    stack = set(decoder.modules())
    targets: dict[str, LoraTarget] = {}
    for name, layer in model.named_modules():
        if layer not in stack or not isinstance(layer, nn.Linear | PackedLinear | Conv1D | RowParallelLinear):
            continue
        if _chooses_experts(layer) or is_absorbed(model, name):
            continue
        if (part := split.get(name)) is None:
            num_in, num_out = _features(layer)
            targets[name] = LoraTarget(layer, num_in, num_out, range(num_in), range(num_out))
        elif part.shard.split is Split.INPUTS:
            outputs = range(part.out_features)
            targets[name] = LoraTarget(layer, part.in_features, part.out_features, part.shard.rows, outputs)
        elif part.shard.split is Split.OUTPUTS:
            inputs = range(part.in_features)
            targets[name] = LoraTarget(layer, part.in_features, part.out_features, inputs, part.shard.rows)
    return targets


def _chooses_experts(layer: nn.Module) -> bool:
    """Whether a linear layer scores experts: its forward returns more than the product, to which nothing can be added.

    Most families have no linear layer there. Those of Llama 4 and Phi-3.5-MoE are called routers in transformers.
    """
    return isinstance(layer, nn.Linear) and type(layer).__name__.endswith("Router")


def _features(layer: nn.Linear | PackedLinear | Conv1D | RowParallelLinear) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        num_in, num_out = layer.weight.shape
        return num_in, num_out
    return layer.in_features, layer.out_features
