"""Plans the slice of each weight that a rank holds: transformers' own tensor-parallel plan, read for plain tensors.

transformers names a style for every module that is to be split. Attention is split by heads: each of n ranks computes
an n-th of the query heads, and holds the KV heads that these attend to (one of them, which other ranks hold too, where
there are fewer KV heads than ranks). Whatever has no style is replicated. A model whose plan says anything else is
refused.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.config.config_rules import architecture_name, count_layer_heads
from actors.model.errors import UnsupportedModel
from kv_transfer.layout import rank_kv_heads

_KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
_EXPERT_STYLES = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


class Split(enum.Enum):
    """How a linear layer, or a mixture of them, is split."""

    OUTPUTS = enum.auto()
    """Each rank computes some outputs, which the next layer takes as they are."""
    INPUTS = enum.auto()
    """Each rank takes some inputs; the outputs are summed over the ranks."""
    GATHERED_OUTPUTS = enum.auto()
    """Each rank computes some outputs; all ranks get all of them."""
    EXPERTS = enum.auto()
    """Each rank computes a part of every expert of a mixture; the outputs are summed over the ranks."""
    SHARES = enum.auto()
    """Experts that return their inputs: each rank returns an equal share, since the ranks' outputs are summed."""
    HEADS = enum.auto()
    """Each rank holds the numbers of its query heads that an attention module has beside its layers: sinks."""


_SPLITS: dict[str, Split | None] = {
    "colwise": Split.OUTPUTS,
    "rowwise": Split.INPUTS,
    "colwise_gather_output": Split.GATHERED_OUTPUTS,
    "moe_tp_experts": Split.EXPERTS,
    "moe_identity_expert": Split.SHARES,
    "local_params": Split.HEADS,
    # The norms within a head, and the latents that all heads read. These plans only concern gradients.
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
    # Every rank keeps all embeddings, because a lookup costs nothing.
    "embedding_rowwise": None,
}


@dataclass(frozen=True, slots=True)
class LayerShard:
    """A rank's part of one layer.

    rows: this rank's outputs, or its inputs if inputs are split; for experts, its intermediate features; for sinks, its
        query heads; for shares, its own number
    num_rows: the padded number of rows, equal on all ranks; rows is shorter on the last ranks if the split is uneven;
        for shares, the number of ranks
    """

    split: Split
    rows: range
    num_rows: int


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A rank's attention heads."""

    num_heads: int
    num_kv_heads: int
    num_replicas: int


def shard_heads(config: PretrainedConfig, tp_size: int, layer: int) -> HeadShard:
    """Return each rank's numbers of heads in a layer.

    Raises UnsupportedModel if the ranks cannot share the heads evenly.
    """
    text = config.get_text_config(decoder=True)
    num_heads, total_num_kv_heads = count_layer_heads(text, layer)
    if num_heads % tp_size:
        raise UnsupportedModel(
            architecture_name(config), f"its {num_heads} attention heads cannot be shared evenly by {tp_size} ranks"
        )
    try:
        num_kv_heads = len(rank_kv_heads(total_num_kv_heads, tp_size, 0))
    except ValueError as error:
        raise UnsupportedModel(architecture_name(config), f"its {error}") from error
    return HeadShard(num_heads // tp_size, num_kv_heads, num_kv_heads * tp_size // total_num_kv_heads)


def plan_shards(model: PreTrainedModel, config: PretrainedConfig, rank: int, size: int) -> dict[str, LayerShard]:
    """Return, by module name, a rank's part of every layer that is split.

    model: the whole model; its weights are not read, so it may be on the meta device
    Raises UnsupportedModel with the module that cannot be split.
    """
    architecture = architecture_name(config)
    styles: dict[str, str] = model.tp_plan
    if not styles:
        raise UnsupportedModel(architecture, "transformers has no tensor-parallel plan for it")
    shards = {}
    for name, module in model.named_modules():
        style = styles.get(_generic(name))
        if style is None:
            _refuse_rows_per_head(name, module, config)
            continue
        split = _SPLITS.get(style)
        if split is None and style in _SPLITS:
            _refuse_rows_per_head(name, module, config)
        if split is Split.EXPERTS:
            shards[name] = _shard_experts(name, module, config, styles, (rank, size))
        elif split is Split.HEADS:
            if not list(module.parameters(recurse=False)):
                continue  # The plan names all attention modules, and MiMo has sinks in some of them.
            shards[name] = _shard_sinks(name, module, config, styles, (rank, size))
        elif split is Split.SHARES:
            shards[name] = LayerShard(split, range(rank, rank + 1), size)
        elif split is not None and isinstance(module, nn.Linear):
            shards[name] = _shard_layer(name, module, split, config, (rank, size))
        elif split is not None or style not in _SPLITS:
            raise UnsupportedModel(
                architecture, f"{name} ({type(module).__name__}) cannot be split over ranks: its plan says {style!r}"
            )
    return shards


def _refuse_rows_per_head(name: str, module: nn.Module, config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for a norm with a row for each head: every rank would hold the rows of all heads."""
    heads = set(count_layer_heads(config.get_text_config(decoder=True), layer_of(name)))
    weight = getattr(module, "weight", None)
    if "norm" not in name.rpartition(".")[2] or not isinstance(weight, nn.Parameter):
        return
    if weight.ndim == 2 and weight.shape[0] in heads:
        raise UnsupportedModel(
            architecture_name(config),
            f"{name} has a row for each of {weight.shape[0]} heads, and its plan does not split it over ranks",
        )


def _shard_layer(
    name: str, layer: nn.Linear, split: Split, config: PretrainedConfig, place: tuple[int, int]
) -> LayerShard:
    rank, size = place
    if split is Split.GATHERED_OUTPUTS:
        if name != "lm_head":
            raise UnsupportedModel(
                architecture_name(config), f"{name} cannot be split over ranks: its plan gathers its output"
            )
        num_rows = -(-layer.out_features // size)
        rows = range(min(rank * num_rows, layer.out_features), min((rank + 1) * num_rows, layer.out_features))
        return LayerShard(split, rows, num_rows)
    if name.rpartition(".")[2] in _KEY_VALUE_PROJECTIONS:
        _, total_num_kv_heads = count_layer_heads(config.get_text_config(decoder=True), layer_of(name))
        head_dim = layer.out_features // total_num_kv_heads
        heads = rank_kv_heads(total_num_kv_heads, size, rank)
        return LayerShard(split, range(heads.start * head_dim, heads.stop * head_dim), len(heads) * head_dim)
    features = layer.out_features if split is Split.OUTPUTS else layer.in_features
    if features % size:
        raise UnsupportedModel(
            architecture_name(config), f"{name} cannot be split over {size} ranks: it has {features} features"
        )
    share = features // size
    return LayerShard(split, range(rank * share, (rank + 1) * share), share)


def _shard_sinks(
    name: str, module: nn.Module, config: PretrainedConfig, styles: dict[str, str], place: tuple[int, int]
) -> LayerShard:
    """Split the parameters that an attention module itself has: one number for each query head."""
    rank, size = place
    num_heads, _ = count_layer_heads(config.get_text_config(decoder=True), layer_of(name))
    own = {weight: tuple(parameter.shape) for weight, parameter in module.named_parameters(recurse=False)}
    planned = {weight: styles.get(f"{_generic(name)}.{weight}") for weight in own}
    if own != {"sinks": (num_heads,)} or planned != {"sinks": "colwise"}:
        raise UnsupportedModel(
            architecture_name(config),
            f"{name} ({type(module).__name__}) cannot be split over ranks: its plan says {planned} of {own}",
        )
    share = num_heads // size
    return LayerShard(Split.HEADS, range(rank * share, (rank + 1) * share), share)


def _shard_experts(
    name: str, module: nn.Module, config: PretrainedConfig, styles: dict[str, str], place: tuple[int, int]
) -> LayerShard:
    """Split experts: gate_up_proj is [experts, 2 * features, hidden], down_proj is [experts, hidden, features]."""
    rank, size = place
    found = {weight: styles.get(f"{_generic(name)}.{weight}") for weight, _ in module.named_parameters()}
    if found != _EXPERT_STYLES:
        raise UnsupportedModel(
            architecture_name(config),
            f"{name} ({type(module).__name__}) cannot be split over ranks: its plan says {found}",
        )
    features = module.get_parameter("down_proj").shape[2]
    if features % size:
        raise UnsupportedModel(
            architecture_name(config), f"{name} cannot be split over {size} ranks: its experts have {features} features"
        )
    share = features // size
    return LayerShard(Split.EXPERTS, range(rank * share, (rank + 1) * share), share)


def layer_of(name: str) -> int:
    """Return the index of the layer that a module is in, by the module's name; 0 for a module outside of layers."""
    found = re.search(r"\.(\d+)(?=\.|$)", name)
    return 0 if found is None else int(found[1])


def _generic(name: str) -> str:
    """Return a module's name as plans write it, with * for each number: layers.*.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
