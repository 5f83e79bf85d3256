"""Loads a model from a checkpoint directory, and checks that this engine computes it correctly."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from actors.checkpoint.generation_defaults import GenerationFile, InvalidGenerationConfig, read_generation_file
from actors.checkpoint.pooling_facts import PoolingFacts
from actors.config import ModelConfig
from actors.model.attention.batch_attention import register_attention
from actors.model.attention.probe import GeometryProbe, KVGeometry
from actors.model.checks.fingerprint import fingerprint_checkpoint
from actors.model.checks.self_check import check_forward
from actors.model.checks.weight_checks import ignored_patterns, refuse_nan, refuse_report, refuse_unread
from actors.model.checks.whole_model import ModelRun, check_split, record_run, run_from_files
from actors.model.config.config_rules import (
    architecture_name,
    describe,
    quantization_method,
    read_config,
    reason_in_windows,
)
from actors.model.config.limits import derive_max_model_len
from actors.model.config.model_kind import ModelKind, kind_of
from actors.model.config.support import attention_choice, refuse_unsupported
from actors.model.config.text_parts import left_out_inputs
from actors.model.dequantizing import finish_loading, refuse_other_dtype, with_plain_weights
from actors.model.errors import CheckpointError, DeviceUnavailable, LoadFailed, ModelError, RankLost, UnsupportedModel
from actors.model.forward import FlatForward
from actors.model.linears.grouped_experts import group_experts
from actors.model.linears.packing import prepare_linears
from actors.model.multimodal.families import VisionFamily, vision_family
from actors.model.pooling.head import ClassificationHead
from actors.model.pooling.loading import load_pooling
from actors.model.states.step_states import BatchWithStates, StateProbe
from actors.model.tensor_parallel.group import TensorParallelGroup
from actors.model.tensor_parallel.part import ModelShard, SplitLinear, build_shard
from actors.model.tensor_parallel.plan import shard_heads
from actors.model.tensor_parallel.weight_sources import CheckpointWeights, DrawnWeights, MergedWeights
from kv_transfer.device_kind import find_accelerator

logger = logging.getLogger(__name__)

_BUILDING = threading.Lock()
"""Held while transformers builds a model: it changes torch's global default dtype and initialisers meanwhile."""

_NUM_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the facts about it that the engine needs.

    eos_token_ids: the tokens that end a sequence; empty if the checkpoint names none
    fingerprint:   see fingerprint_checkpoint
    pooling:       the vectors that the model gives; None if it gives none
    head:          the classification head; None if the model does not classify
    split:         the linear layers of which this rank has only a part, by name
    vision_family: None if the model takes text only
    linear_layers: whether these are packed, and why, for display
    left_out_inputs: the inputs that the whole model takes and that are not served, for display
    """

    forward: FlatForward
    geometry: KVGeometry
    architecture: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    pooling: PoolingFacts | None = None
    head: ClassificationHead | None = None
    split: Mapping[str, SplitLinear] = field(default_factory=dict)
    vision_family: VisionFamily | None = None
    linear_layers: str = ""
    left_out_inputs: str = ""


def load_model(model_config: ModelConfig, group: TensorParallelGroup | None = None) -> LoadedModel:
    """Read the checkpoint with transformers' own loader, offline, and check that it can be served.

    group: the ranks that share the model; each reads its own slices and then takes part in the checks
    Raises CheckpointError if files are missing or unreadable, UnsupportedModel if it must not be served, RankLost.
    """
    try:
        return _load(model_config, group)
    except ModelError:
        raise
    except Exception as error:
        # transformers may raise anything, and some of its exceptions cannot be sent to another process.
        logger.exception("the model could not be loaded")
        raise LoadFailed(f"model: {model_config.model} cannot be loaded: {describe(error)}") from error


def _load(model_config: ModelConfig, group: TensorParallelGroup | None) -> LoadedModel:
    directory = _checkpoint_directory(model_config)
    if group is None:
        with _BUILDING:
            config, shard = _build(directory, model_config, None)
            return _finish(directory, config, shard, model_config, None)
    with _BUILDING:
        config, shard = _build(directory, model_config, group)
    # No rank computes before all ranks have built: they may be threads of one process, and a check needs all of them.
    group.smallest(0)
    return _finish(directory, config, shard, model_config, group)


def _build(
    directory: Path, model_config: ModelConfig, group: TensorParallelGroup | None
) -> tuple[PretrainedConfig, ModelShard]:
    config = read_config(directory, trust_remote_code=model_config.trust_remote_code)
    if left_out := left_out_inputs(config):
        logger.info(
            "only the model's text part is served, and the weights for other inputs are not read",
            extra={"architecture": architecture_name(config), "left_out": left_out},
        )
    # A faulty generation file is refused before the weights are read.
    _read_generation_file(directory)
    # This builds a model too, for inspection.
    refuse_unsupported(
        config,
        trust_remote_code=model_config.trust_remote_code,
        tp_size=1 if group is None else group.size,
    )
    register_attention()
    if group is None:
        return config, ModelShard(_read_model(directory, config, model_config), {})
    return config, _read_shard(directory, config, model_config, group)


def _finish(
    directory: Path,
    config: PretrainedConfig,
    shard: ModelShard,
    model_config: ModelConfig,
    group: TensorParallelGroup | None,
) -> LoadedModel:
    started, model = time.monotonic(), shard.model
    model.train(False)
    model.to(choose_device(model_config))  # type: ignore[arg-type]  # transformers' decorator hides the signature
    if model_config.load_format == "auto":
        refuse_nan(directory, model)
    # A flattened batch has no padding, so the padding token is a token like any other. The config's own validation,
    # which demands a number in some families, is bypassed.
    object.__setattr__(model.config, "pad_token_id", None)
    kind = kind_of(config)
    group_experts(model)
    forward = FlatForward(model, kind)
    max_model_len = derive_max_model_len(config, model_config.max_model_len, forward.first_position)
    architecture = architecture_name(config)
    geometry, vocab_size = _probe(forward, config, 1 if group is None else group.size)
    if group is not None:
        geometry = _add_rank(geometry, config, group)
    _check_direction(kind, geometry, architecture)
    if vision_family(config) is not None and (irregularity := geometry.irregularity) is not None:
        # Embeddings of images travel in blocks, token by token.
        raise UnsupportedModel(architecture, f"{irregularity}, which is not served for models with images")
    _check_windows(config.get_text_config(decoder=True), geometry, architecture, max_model_len)
    if group is not None:
        run_whole = partial(_run_whole, directory, config, model_config, model.dtype)
        check_split(forward, group, run_whole, vocab_size=vocab_size, max_tokens=max_model_len)
    # After the other checks, so that it sees the model as it will be served, but for the order of its weights.
    check_forward(forward, geometry, vocab_size=vocab_size, max_tokens=max_model_len)
    pooling, head = load_pooling(directory, config, kind, forward, is_causal=geometry.is_causal)
    # After every check that reads a plain weight; packing has its own.
    linear_layers = prepare_linears(model_config, forward, architecture, group)
    logger.info(
        "checked the model", extra={"architecture": architecture, "elapsed_s": round(time.monotonic() - started, 3)}
    )
    return LoadedModel(
        forward=forward,
        geometry=geometry,
        architecture=architecture,
        device=model.device,
        dtype=model.dtype,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_read_eos_token_ids(directory, config),
        fingerprint=fingerprint_checkpoint(directory, model_config, str(model.dtype)),
        pooling=pooling,
        head=head,
        split=shard.split,
        vision_family=vision_family(config),
        linear_layers=linear_layers,
        left_out_inputs=left_out_inputs(config),
    )


def _checkpoint_directory(model_config: ModelConfig) -> Path:
    directory = Path(model_config.model)
    if not directory.is_dir():
        raise CheckpointError(f"model: {directory} is not a directory; it must hold a checkpoint")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"model: {directory} has no config.json, so it is no Hugging Face checkpoint")
    if model_config.load_format == "auto" and not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"model: {directory} has no *.safetensors files (load_format: dummy needs none)")
    return directory


def _read_model(directory: Path, config: PretrainedConfig, model_config: ModelConfig) -> PreTrainedModel:
    refuse_other_dtype(config, _named_dtype(model_config))
    dtype = _named_dtype(model_config) or "auto"
    if model_config.load_format == "dummy":
        return _make_dummy_model(config, model_config, dtype)
    try:
        loaded: tuple[PreTrainedModel, dict[str, set[object]]] = kind_of(config).auto_class.from_pretrained(  # type: ignore[assignment]  # the stubs ignore output_loading_info
            directory,
            output_loading_info=True,
            # refuse_report() names both shapes; transformers' own error names none.
            ignore_mismatched_sizes=True,
            config=with_plain_weights(config),
            dtype=dtype,
            attn_implementation=attention_choice(config),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=model_config.trust_remote_code,
        )
    except ImportError as exc:
        method = quantization_method(config) or "none"
        raise UnsupportedModel(
            architecture_name(config),
            f"transformers needs a package to load it that is not installed (quantization: {method}): {exc}",
        ) from exc
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise CheckpointError(f"model: the weights in {directory} cannot be loaded: {exc}") from exc
    model, report = loaded
    refuse_report(directory, report, config)
    if quantization_method(config) is not None:
        finish_loading(model, _named_dtype(model_config) or getattr(model.config, "dtype", None) or model.dtype)
    return model


def _make_dummy_model(config: PretrainedConfig, model_config: ModelConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    """Make a model of random weights. The global generator is left as it was."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model_config.seed)
        model: PreTrainedModel = kind_of(config).auto_class.from_config(  # type: ignore[no-untyped-call]  # left untyped
            config,
            dtype=dtype,
            attn_implementation=attention_choice(config),
            trust_remote_code=model_config.trust_remote_code,
        )
    return model


def _read_shard(
    directory: Path, config: PretrainedConfig, model_config: ModelConfig, group: TensorParallelGroup
) -> ModelShard:
    """Read one rank's part of the model that _read_model() reads whole."""
    trust_remote_code = model_config.trust_remote_code
    if model_config.load_format == "dummy":
        whole = _make_dummy_model(config, model_config, _named_dtype(model_config) or "auto")
        drawn = DrawnWeights(whole.state_dict())
        return build_shard(config, whole.dtype, lambda model: drawn, group, trust_remote_code=trust_remote_code)
    with CheckpointWeights(directory) as checkpoint:
        dtype = _named_dtype(model_config) or getattr(config, "dtype", None) or checkpoint.first_dtype()
        shard = build_shard(
            config,
            dtype,
            lambda model: MergedWeights(checkpoint, model),
            group,
            trust_remote_code=trust_remote_code,
        )
    ignored = ignored_patterns(shard.model)
    unread = [name for name in shard.unread if ignored is None or not ignored.search(name)]
    refuse_unread(directory, unread, config)
    return shard


def _run_whole(
    directory: Path, config: PretrainedConfig, model_config: ModelConfig, dtype: torch.dtype, tokens: Tensor
) -> ModelRun:
    """Run the whole model over the tokens, and return the record that one rank compares its own run with."""
    trust_remote_code = model_config.trust_remote_code
    if model_config.load_format == "auto":
        with _BUILDING:
            return run_from_files(directory, config, dtype, tokens, trust_remote_code=trust_remote_code)
    with _BUILDING:
        whole = _make_dummy_model(copy.deepcopy(config), model_config, dtype)
    whole.train(False)
    whole.set_attn_implementation("eager")
    with torch.inference_mode():
        run = record_run(FlatForward(whole, kind_of(config)), tokens.cpu())
    output = None if run.output is None else run.output.to(tokens.device)
    return ModelRun(tuple(layer.to(tokens.device) for layer in run.layers), output)


def _named_dtype(model_config: ModelConfig) -> torch.dtype | None:
    """Return the configured dtype, or None for auto."""
    dtype: torch.dtype | None = None if model_config.dtype == "auto" else getattr(torch, model_config.dtype)
    return dtype


def _add_rank(geometry: KVGeometry, config: PretrainedConfig, group: TensorParallelGroup) -> KVGeometry:
    """Add the rank to the geometry. Raises UnsupportedModel if attention is not split by the plan."""
    for layer, plane in geometry.layer_planes.items():
        heads, expected = geometry.groups[plane.group], shard_heads(config, group.size, layer)
        if (heads.num_heads, heads.num_kv_heads) != (expected.num_heads, expected.num_kv_heads):
            raise UnsupportedModel(
                architecture_name(config),
                f"its plan does not split its attention: each of {group.size} ranks has {heads.num_heads} heads and "
                f"{heads.num_kv_heads} KV heads instead of {expected.num_heads} and {expected.num_kv_heads}",
            )
    return replace(geometry, tp_rank=group.rank, tp_size=group.size)


def choose_device(model_config: ModelConfig) -> torch.device:
    """Return the device that the configuration names. Raises DeviceUnavailable if torch does not find it."""
    if model_config.device == "auto":
        return find_accelerator() or torch.device("cpu")
    if model_config.device == "cpu":
        return torch.device("cpu")
    if (found := find_accelerator()) is None:
        raise DeviceUnavailable("device: cuda was asked for, but torch finds no GPU here")
    return found


@torch.inference_mode()
def _probe(forward: FlatForward, config: PretrainedConfig, num_ranks: int) -> tuple[KVGeometry, int]:
    """Run a few tokens through the model; returns the attention that its layers ask for, and its vocabulary size."""
    architecture = architecture_name(config)
    probe, states = GeometryProbe(architecture), StateProbe()
    tokens = torch.arange(_NUM_PROBE_TOKENS, device=forward.model.device)
    try:
        output = forward(tokens, tokens, BatchWithStates(probe, states), tokens[-1:])
    except UnsupportedModel as exc:
        raise UnsupportedModel(architecture, f"{exc.reason} (in {exc.architecture})") from exc
    except RankLost:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as exc:
        split = f" on one of {num_ranks} ranks" if num_ranks > 1 else ""
        raise UnsupportedModel(architecture, f"its forward does not take a flattened batch{split}: {exc!r}") from exc
    geometry = probe.geometry(
        lambda layer: shard_heads(config, num_ranks, layer).num_replicas if num_ranks > 1 else 1, states.state
    )
    if forward.generates:
        return geometry, output.shape[-1]
    embeddings = forward.model.get_input_embeddings()
    assert isinstance(embeddings.weight, torch.Tensor), "a model that takes tokens looks them up"
    return geometry, embeddings.weight.shape[0]


def _check_direction(kind: ModelKind, geometry: KVGeometry, architecture: str) -> None:
    """Refuse to generate with a model that is not causal, and refuse models in which only some layers are causal."""
    if geometry.is_causal:
        return
    if kind is not ModelKind.EMBEDDING:
        raise UnsupportedModel(architecture, "its attention is not causal; such a model is served without a head only")
    if any(layer.is_causal for layer in geometry.layers) or geometry.sliding_windows != {None}:
        raise UnsupportedModel(
            architecture,
            "some of its layers are causal and some are not, or it has sliding windows and is not causal",
        )


def _check_windows(text: PretrainedConfig, geometry: KVGeometry, architecture: str, max_model_len: int) -> None:
    """Refuse a model whose layers do not ask for the sliding windows that its config names."""
    windows = [layer.sliding_window for layer in geometry.layers]
    if (reason := reason_in_windows(text, windows, max_model_len)) is not None:
        raise UnsupportedModel(architecture, reason)


def _read_generation_file(directory: Path) -> GenerationFile:
    try:
        return read_generation_file(directory)
    except InvalidGenerationConfig as error:
        raise CheckpointError(f"model: {error}") from error


def _read_eos_token_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of generation_config.json, or else of the config."""
    from_file = _read_generation_file(directory).eos_token_ids
    if from_file is not None:
        return from_file
    eos: int | list[int] | None = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
