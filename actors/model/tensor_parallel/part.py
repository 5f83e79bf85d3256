"""One rank's part of a model, built from transformers' own tensor-parallel plan with plain tensors.

transformers would make every weight a DTensor (benchmarks/RESULTS.md has the cost). Here the model is built without
memory, its linear layers are cut as the plan says, and each rank reads only its own slices from the checkpoint. A
forward has one all-reduce after each layer that is split by its inputs, and one all-gather of the logits: so the logits
have the same bits on every rank, and every rank samples the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.attention.batch_attention import ATTENTION_NAME
from actors.model.config.config_rules import architecture_name, has_latents
from actors.model.config.model_kind import kind_of
from actors.model.errors import CheckpointError, UnsupportedModel
from actors.model.tensor_parallel.group import TensorParallelGroup
from actors.model.tensor_parallel.plan import LayerShard, Split, layer_of, plan_shards, shard_heads
from actors.model.tensor_parallel.split_layers import GatheredLinear, RowParallelLinear
from actors.model.tensor_parallel.weight_sources import WeightSource


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a weight that a rank holds.

    rows: ranges along dim that are concatenated; the whole weight if empty
    num_rows: the part's size along dim, to which it is padded with zeros
    """

    dim: int = 0
    rows: tuple[range, ...] = ()
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """A linear layer of which a rank has a part. in_features and out_features are the whole layer's."""

    shard: LayerShard
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part of a model.

    split: its linear layers that are split, by name
    unread: weights that the checkpoint has and the model does not
    """

    model: PreTrainedModel
    split: Mapping[str, SplitLinear]
    unread: tuple[str, ...] = ()


def build_shard(
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights_for: Callable[[PreTrainedModel], WeightSource],
    group: TensorParallelGroup,
    *,
    trust_remote_code: bool,
) -> ModelShard:
    """Build this rank's part of the model, on the CPU, with its weights.

    weights_for: opens the weights of a model that is on the meta device
    Raises UnsupportedModel, naming what cannot be split, or CheckpointError, naming the weights that are missing.
    """
    with torch.device("meta"):
        model: PreTrainedModel = kind_of(config).auto_class.from_config(  # type: ignore[no-untyped-call]  # left untyped
            config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code
        )
    shards = plan_shards(model, config, group.rank, group.size)
    weights = weights_for(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    saved_buffers = {name: tuple(model.get_buffer(name).shape) for name in model.state_dict() if name not in shapes}
    split = _split_linears(model, shards)
    compute_buffers(model, config)
    for name, shard in shards.items():
        _replace_layer(model, name, shard, group)
    for name, module in model.named_modules():
        # Latent attention expands keys and values for each query head, so its groups have one.
        if hasattr(module, "num_key_value_groups") and not has_latents(config.get_text_config(decoder=True)):
            heads = shard_heads(config, group.size, layer_of(name))
            setattr(module, "num_key_value_groups", heads.num_heads // heads.num_kv_heads)  # noqa: B010  # untyped
    _fill(model, shapes | saved_buffers, shards, weights)
    return ModelShard(model, split, tuple(weights.unread))


def _split_linears(model: nn.Module, shards: Mapping[str, LayerShard]) -> dict[str, SplitLinear]:
    """Return the linear layers to split. Must run before _replace_layer, which changes their feature counts."""
    layers = ((name, model.get_submodule(name), shard) for name, shard in shards.items())
    return {
        name: SplitLinear(shard, layer.in_features, layer.out_features)
        for name, layer, shard in layers
        if isinstance(layer, nn.Linear)
    }


def compute_buffers(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Give memory and values to buffers that no checkpoint holds: rotary frequencies, embedding scales.

    transformers' own initialisation computes them. A number of _unset() that is left shows a buffer that it does not
    set.
    Raises UnsupportedModel, naming such buffers.
    """
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        for key, buffer in buffers.items():
            module._buffers[key] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
        if not buffers:
            continue
        _owner(model, name)._init_weights(module)  # type: ignore[no-untyped-call]  # left untyped
        if unset := [key for key in buffers if _is_unset(getattr(module, key))]:
            raise UnsupportedModel(
                architecture_name(config), f"{name} has values of its own that no checkpoint holds: {', '.join(unset)}"
            )


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model that the module is a part of: its _init_weights knows the module."""
    owner: PreTrainedModel = model
    module: nn.Module = model
    for part in name.split(".") if name else []:
        module = module.get_submodule(part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner


def _unset(dtype: torch.dtype) -> float:
    """Return a number that no buffer has: NaN, or the least integer."""
    return float("nan") if dtype.is_floating_point or dtype is torch.bool else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor) -> bool:
    number = _unset(buffer.dtype)
    return bool((torch.isnan(buffer) if math.isnan(number) else buffer == number).any())


def _replace_layer(model: nn.Module, name: str, shard: LayerShard, group: TensorParallelGroup) -> None:
    layer = model.get_submodule(name)
    if shard.split is Split.EXPERTS:
        setattr(layer, "intermediate_dim", shard.num_rows)  # noqa: B010  # untyped
        layer.register_forward_hook(lambda module, inputs, output: group.all_reduce(output))
        return
    if shard.split is Split.SHARES:
        layer.register_forward_hook(lambda module, inputs, output: output / shard.num_rows)
        return
    if shard.split is Split.HEADS:
        return
    assert isinstance(layer, nn.Linear)
    replacement: nn.Module
    if shard.split is Split.INPUTS:
        replacement = RowParallelLinear(shard.num_rows, layer.out_features, group)
    elif shard.split is Split.GATHERED_OUTPUTS:
        replacement = GatheredLinear(layer.in_features, layer.out_features, group)
    else:
        layer.out_features = shard.num_rows
        return
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, replacement)


def _fill(
    model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], shards: dict[str, LayerShard], weights: WeightSource
) -> None:
    sources = {name: _source(name, model) for name in shapes}
    wrong = [
        f"{source} ({weights.shape(source)} instead of {shapes[name]})" if weights.shape(source) else source
        for name, source in sources.items()
        if weights.shape(source) != shapes[name]
    ]
    if wrong:
        raise CheckpointError(f"model: weights are missing, or have another shape: {', '.join(sorted(set(wrong)))}")
    for name, source in sources.items():
        owner, _, attribute = name.rpartition(".")
        tensor = _read(weights, source, _part_of(attribute, shapes[name], shards.get(owner)))
        module = model.get_submodule(owner)
        if attribute in module._buffers:
            module._buffers[attribute] = tensor.to(module.get_buffer(attribute).dtype)
            continue
        module.register_parameter(attribute, nn.Parameter(tensor.to(model.dtype), requires_grad=False))


def _source(name: str, model: PreTrainedModel) -> str:
    """Return a weight's name in the checkpoint: a tied output layer's is the name of the embeddings."""
    tied: dict[str, str] = model.all_tied_weights_keys
    return tied.get(name, name)


def _part_of(attribute: str, shape: tuple[int, ...], shard: LayerShard | None) -> _Part:
    if shard is None or (shard.split is Split.INPUTS and attribute == "bias"):
        return _Part()
    if shard.split is not Split.EXPERTS:
        return _Part(1 if shard.split is Split.INPUTS else 0, (shard.rows,), shard.num_rows)
    if attribute == "down_proj":
        return _Part(2, (shard.rows,), shard.num_rows)
    # The rows of gate_proj come first, then those of up_proj.
    middle = shape[1] // 2
    return _Part(1, (shard.rows, range(middle + shard.rows.start, middle + shard.rows.stop)), 2 * shard.num_rows)


def _read(weights: WeightSource, name: str, part: _Part) -> Tensor:
    if not part.rows:
        return weights.read(name)
    pieces = [weights.read(name, part.dim, rows) for rows in part.rows]
    missing = part.num_rows - sum(len(rows) for rows in part.rows)
    if missing:
        padding = list(pieces[0].shape)
        padding[part.dim] = missing
        pieces.append(pieces[0].new_zeros(padding))
    return torch.cat(pieces, part.dim)
