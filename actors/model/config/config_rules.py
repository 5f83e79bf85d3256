"""Finds reasons in a checkpoint's config.json alone not to serve the model.

Neither torch nor the weights are needed here, so `raypd serve` and `raypd doctor` ask before any engine starts; an
engine asks the same functions again before it reads weights. What passes still has to prove itself: see support.py and
self_check.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from actors.model.config.class_facts import (
    ACTIVATIONS,
    BIDIRECTIONAL_UNLESS_DECODER,
    IN_EXTRA_QUANTIZED,
    QUANTIZATION_PACKAGES,
    RECURRENT_MODULES,
    REFUSED_ON_TRIAL,
    WITH_BATCH_DELIVERED,
    WITH_CHUNKED_ATTENTION,
    WITH_LATENT_ATTENTION,
    WITH_POSITIONS_AFTER_PADDING,
    WITH_RECURRENT_STATE,
    WITH_WINDOW_IN_MASK,
    WITHOUT_ATTENTION,
    WITHOUT_ATTENTION_INTERFACE,
)
from actors.model.config.model_kind import ModelKind, has_class, kind_of
from actors.model.config.text_parts import as_text_part
from actors.model.errors import CheckpointError, UnsupportedModel
from actors.model.multimodal.families import SERVED_FAMILIES, vision_family
from kv_transfer.layout import rank_kv_heads

NO_DRAFTS_WITH_STATES: Final = (
    "it keeps recurrent states, out of which a rejected draft's tokens cannot be taken back; such a model is served "
    "without speculative decoding (unset scheduler.speculative)"
)
_SERVED_LAYER_TYPES: Final = {"full_attention", "sliding_attention"}
_RECURRENT_LAYER_TYPES: Final = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""The further layer types of models with recurrent layers, some of which neither attend nor keep a state."""
_OTHER_INPUTS: Final = ("vision_config", "audio_config", "speech_config")
_LAYER_TYPE_FIELDS: Final = ("layer_types", "layers_block_type", "attention_layers")
_ACTIVATION_FIELDS: Final = ("hidden_act", "hidden_activation", "activation_function")
_OTHER_HEADS: Final = ("ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "ForMultipleChoice")
_KIND_NAMES: Final = {
    ModelKind.GENERATION: "causal language model",
    ModelKind.GENERATION_FROM_IMAGES: "model of images and text",
    ModelKind.EMBEDDING: "model",
    ModelKind.CLASSIFICATION: "model for sequence classification",
}
_HOW_TO_INSTALL_GPTQMODEL: Final = (
    "`pip install --no-build-isolation 'gptqmodel<7.7' optimum accelerate` installs what is tested "
    "(gptqmodel 7.7 needs torch 2.14.1)"
)
_OTHER_CHECKPOINTS: Final = "the checkpoint without quantization, one in FP8, or one of compressed-tensors (W4A16)"
_CONFIG_ERRORS: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


def read_config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read config.json with transformers' config class; of a model that is served as a language model, its text part.

    Raises CheckpointError if the file cannot be used.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        text = config.get_text_config(decoder=True)
    except (*_CONFIG_ERRORS, StrictDataclassError) as error:
        raise CheckpointError(f"model: {directory / 'config.json'} cannot be used: {describe(error)}") from error
    if not isinstance(text, PretrainedConfig):
        raise CheckpointError(f"model: {directory / 'config.json'} cannot be used: its text_config is no object")
    return as_text_part(config)


def architecture_name(config: PretrainedConfig) -> str:
    """Return the class name that the checkpoint gives, or the model type if the checkpoint gives none."""
    architectures = getattr(config, "architectures", None)
    return str(architectures[0]) if architectures else str(config.model_type)


def describe(error: Exception) -> str:
    """Return an error's message in one line, or the error's class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def refuse_by_config(config: PretrainedConfig, tp_size: int) -> None:
    """Raise UnsupportedModel if the config shows that an engine of tp_size ranks cannot serve the model."""
    if (reason := reason_in_config(config) or reason_on_ranks(config, tp_size)) is not None:
        raise UnsupportedModel(architecture_name(config), reason)


def reason_in_config(config: PretrainedConfig) -> str | None:
    """Return why no engine serves the model, or None if the config names no reason."""
    return next((reason for reason in _reasons(config) if reason is not None), None)


def reason_on_trial(config: PretrainedConfig, max_model_len: int) -> str | None:
    """Return why an engine would refuse the model once it had run it, or None if that is not known."""
    if (reason := REFUSED_ON_TRIAL.get(str(config.model_type))) is not None:
        return reason
    text = config.get_text_config(decoder=True)
    if text.model_type not in WITH_WINDOW_IN_MASK:
        return None
    return reason_in_windows(text, [None] * text.num_hidden_layers, max_model_len)


def reason_in_windows(text: PretrainedConfig, windows: list[int | None], max_model_len: int) -> str | None:
    """Return why a model whose layers ask attention for these windows is not served; None if its config agrees.

    windows: each layer's sliding window in tokens, None for full attention
    A model that is refused here applies its window in a mask of its own, which our attention never sees. The self-check
    would notice only if its sequences were longer than the window.
    """
    window = getattr(text, "sliding_window", None)
    if window is None or window >= max_model_len or getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    is_expected = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(windows)
    asks = [asked == window for asked in windows]
    if asks == is_expected:
        return None
    return (
        f"its config names a sliding window of {window} in layers {_indices(is_expected)}, but its attention "
        f"asks for it in layers {_indices(asks)}"
    )


def _indices(flags: list[bool]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]


def reason_on_ranks(config: PretrainedConfig, tp_size: int) -> str | None:
    """Return why the model cannot be split over tp_size ranks, or None if the config names no reason."""
    if tp_size == 1:
        return None
    if keeps_served_states(config):
        return (
            "transformers' tensor-parallel plan does not split its recurrent layers: "
            f"tensor_parallel_size is {tp_size}, and 1 is possible"
        )
    if vision_family(config) is not None:
        return f"models with images run on one rank, and tensor_parallel_size is {tp_size}"
    if (method := quantization_method(config)) is not None:
        return (
            f"its weights are quantized ({method}), which several ranks cannot read yet: "
            f"tensor_parallel_size is {tp_size}, and 1 is possible"
        )
    text = config.get_text_config(decoder=True)
    for num_heads, num_kv_heads in sorted({count_layer_heads(text, layer) for layer in range(count_layers(text))}):
        if num_heads % tp_size:
            return f"its {num_heads} attention heads cannot be shared evenly by {tp_size} ranks"
        try:
            rank_kv_heads(num_kv_heads, tp_size, 0)
        except ValueError as error:
            return f"its {error}"
    if not type(config).__module__.startswith("transformers."):
        return None
    if not _has_plan(config):
        return f"transformers has no tensor-parallel plan for it: tensor_parallel_size is {tp_size}, and 1 is possible"
    if has_latents(text) and not _plan_splits_attention(config):
        return (
            "transformers' tensor-parallel plan does not split its latent attention: "
            f"tensor_parallel_size is {tp_size}, and 1 is possible"
        )
    return None


def count_layers(text: PretrainedConfig) -> int:
    """Return the number of a model's layers; 1 if its config does not say it."""
    return int(getattr(text, "num_hidden_layers", None) or 1)


def count_layer_heads(text: PretrainedConfig, layer: int) -> tuple[int, int]:
    """Return the number of attention heads of one layer, and the number of its KV heads."""
    if getattr(text, "is_heterogeneous", False):
        return count_heads(text.per_layer_config[layer])
    num_heads, num_kv_heads = count_heads(text)
    if text.model_type == "mimo_v2_flash" and text.layer_types[layer] == "sliding_attention":
        # transformers' class doubles them in the layers with a window.
        return num_heads, 2 * num_kv_heads
    return num_heads, num_kv_heads


def count_heads(text: PretrainedConfig) -> tuple[int, int]:
    """Return the number of attention heads of a layer, and the number of its KV heads, for a model of like layers.

    With latent attention, the latent and the rotary key of a token are one KV head.
    """
    num_heads = int(text.num_attention_heads)
    if has_latents(text):
        return num_heads, 1
    if text.model_type == "falcon":
        if text.new_decoder_architecture:
            return num_heads, int(text.num_kv_heads)
        return num_heads, 1 if text.multi_query else num_heads
    return num_heads, int(getattr(text, "num_key_value_heads", None) or num_heads)


def has_latents(text: PretrainedConfig) -> bool:
    """Whether the model has latent attention (MLA), served or not."""
    try:
        return getattr(text, "kv_lora_rank", None) is not None
    except RuntimeError:
        # transformers raises if each layer has its own kv_lora_rank.
        return True


def quantization_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the checkpoint's quantization_config; empty if its weights are not quantized."""
    text = config.get_text_config(decoder=True)
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None) or {}
    return dict(settings) if isinstance(settings, dict) else dict(settings.to_dict())


def quantization_method(config: PretrainedConfig) -> str | None:
    """Return the method that the checkpoint's weights are quantized with; None if they are not quantized."""
    settings = quantization_settings(config)
    if not settings:
        return None
    method = settings.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(settings) else "no quant_method")
    return str(getattr(method, "value", method))


def keeps_recurrent_state(config: PretrainedConfig) -> bool:
    """Whether layers keep a state other than keys and values; some models have such layers in some checkpoints only."""
    text = config.get_text_config(decoder=True)
    kinds = [str(kind) for field in _LAYER_TYPE_FIELDS for kind in getattr(text, field, None) or []]
    return not kinds or not set(kinds) <= _SERVED_LAYER_TYPES


def keeps_served_states(config: PretrainedConfig) -> bool:
    """Whether the model keeps recurrent states that raypd serves."""
    text = config.get_text_config(decoder=True)
    return text.model_type in RECURRENT_MODULES and keeps_recurrent_state(config)


def reason_against_drafts(config: PretrainedConfig) -> str | None:
    """Return why a model can be neither target nor draft model of speculative decoding; None if it can."""
    return NO_DRAFTS_WITH_STATES if keeps_served_states(config) else None


def is_recurrence_unserved(config: PretrainedConfig) -> bool:
    """Whether the model has layers that may keep a state, and raypd does not know its recurrent modules."""
    text = config.get_text_config(decoder=True)
    return text.model_type not in RECURRENT_MODULES and keeps_recurrent_state(config)


def _reasons(config: PretrainedConfig) -> Iterator[str | None]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; only decoder-only models are served"
    other = [name for name in _OTHER_INPUTS if getattr(config, name, None) is not None]
    if other and vision_family(config) is None:
        served = ", ".join(SERVED_FAMILIES)
        yield f"it takes more than text ({', '.join(other)}), and is none of the families that are served: {served}"
    yield _reason_in_text(config.get_text_config(decoder=True))
    yield _reason_in_layer_types(config.get_text_config(decoder=True))
    yield _reason_in_head(config)
    yield _reason_in_class_facts(config)
    yield _reason_in_names(config.get_text_config(decoder=True))
    yield _reason_in_quantization(config)


def _reason_in_text(text: PretrainedConfig) -> str | None:
    if has_latents(text) and text.model_type not in WITH_LATENT_ATTENTION:
        if getattr(text, "index_topk", None):
            return "its latent attention (MLA) chooses by an indexer which tokens it reads (sparse attention)"
        return f"its latent attention (MLA) is of a kind that is not served ({text.model_type})"
    if getattr(text, "alibi", False):
        return "it uses ALiBi position biases"
    num_shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if num_shared and num_shared >= count_layers(text):
        return "all of its layers read the keys and values of another model, whose assistant it is"
    if getattr(text, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    if getattr(text, "add_cross_attention", False):
        return "it has cross-attention"
    return None


def _reason_in_layer_types(text: PretrainedConfig) -> str | None:
    served = _SERVED_LAYER_TYPES | ({"chunked_attention"} if text.model_type in WITH_CHUNKED_ATTENTION else set())
    if text.model_type in RECURRENT_MODULES:
        served |= _RECURRENT_LAYER_TYPES
    for field in _LAYER_TYPE_FIELDS:
        kinds = getattr(text, field, None) or []
        if other := sorted({str(kind) for kind in kinds} - served):
            state = "; it keeps recurrent state there" if text.model_type in WITH_RECURRENT_STATE else ""
            return f"it has layers of a kind that is not served ({field}: {', '.join(other)}){state}"
    return None


def _reason_in_head(config: PretrainedConfig) -> str | None:
    name = architecture_name(config)
    if name.endswith(_OTHER_HEADS):
        return "a model with this head is not served: it gives neither the next token nor an embedding"
    if type(config).__module__.startswith("transformers.") and not has_class(config):
        return f"transformers has no {_KIND_NAMES[kind_of(config)]} for it"
    is_encoder = config.model_type in BIDIRECTIONAL_UNLESS_DECODER and not getattr(config, "is_decoder", False)
    if is_encoder and kind_of(config) is ModelKind.GENERATION:
        return "its attention is not causal; such a model is served without a head only"
    if config.model_type in WITH_POSITIONS_AFTER_PADDING and kind_of(config) is ModelKind.GENERATION:
        # Its forward gives other tokens than transformers' generate(), which hands it positions from 0 on.
        return "it numbers positions from the one after its padding token, and transformers' generate() from 0"
    return None


def _reason_in_class_facts(config: PretrainedConfig) -> str | None:
    if is_recurrence_unserved(config) and config.model_type in WITH_RECURRENT_STATE:
        return f"it keeps recurrent state of a kind that is not served ({config.model_type})"
    if config.model_type in WITHOUT_ATTENTION_INTERFACE - WITH_BATCH_DELIVERED - WITHOUT_ATTENTION:
        return "its implementation does not run through transformers' AttentionInterface"
    return None


def _reason_in_names(text: PretrainedConfig) -> str | None:
    for field in _ACTIVATION_FIELDS:
        name = getattr(text, field, None)
        if isinstance(name, str) and name not in ACTIVATIONS:
            return f"its config names an activation that transformers does not know ({field}: {name!r})"
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [parameters] if "rope_type" in parameters else list(parameters.values())
    for rope in by_layer_type:
        kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
        if kind not in ROPE_INIT_FUNCTIONS and kind != "default":
            return f"its config names a rotary embedding that transformers does not know (rope_type: {kind!r})"
    return None


def _reason_in_quantization(config: PretrainedConfig) -> str | None:
    method = quantization_method(config)
    missing = [name for name in QUANTIZATION_PACKAGES.get(method or "", ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    packages = " and ".join(missing)
    reads = f"its weights are quantized ({method}), which transformers reads with {packages}: not installed"
    if set(missing) <= IN_EXTRA_QUANTIZED:
        return f"{reads}; `pip install 'raypd[quantized]'` installs it"
    if method in ("awq", "gptq"):
        return f"{reads}; {_HOW_TO_INSTALL_GPTQMODEL}, or serve {_OTHER_CHECKPOINTS}"
    return f"{reads}, and not tested with raypd; serve {_OTHER_CHECKPOINTS}"


def _has_plan(config: PretrainedConfig) -> bool:
    text = config.get_text_config(decoder=True)
    return bool(getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None))


def _plan_splits_attention(config: PretrainedConfig) -> bool:
    text = config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None) or {}
    return any(name.endswith(".o_proj") for name in plan)


def _is_bitsandbytes(settings: dict[str, Any]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))
