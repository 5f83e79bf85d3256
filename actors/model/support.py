"""Which models are refused before their weights are read, and why.

What passes here still has to prove itself: the geometry probe and the self-check run the loaded model.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.attention.base import ATTENTION_NAME
from actors.model.errors import UnsupportedModel
from actors.model.model_kind import ModelKind, kind_of
from actors.model.multimodal.families import SERVED_FAMILIES, vision_family

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config")
_LAYER_TYPE_FIELDS = ("layer_types", "layers_block_type", "attention_layers")
_KIND_NAMES = {
    ModelKind.GENERATION: "causal language model",
    ModelKind.GENERATION_FROM_IMAGES: "model of images and text",
    ModelKind.EMBEDDING: "model",
    ModelKind.CLASSIFICATION: "model for sequence classification",
}


def refuse_unsupported(config: PretrainedConfig, *, trust_remote_code: bool) -> None:
    """Raise UnsupportedModel if the config or the class behind it shows what the engine cannot serve."""
    architecture = architecture_name(config)
    reason = _reason_in_config(config) or _reason_in_class(config, trust_remote_code)
    if reason is not None:
        raise UnsupportedModel(architecture, reason)


def attention_choice(config: PretrainedConfig) -> str | dict[str, str]:
    """Which attention the model's parts are to use: the decoder ours, an encoder of images torch's own."""
    if vision_family(config) is None:
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def architecture_name(config: PretrainedConfig) -> str:
    """The class name that the checkpoint gives, or its model type."""
    architectures = getattr(config, "architectures", None)
    return str(architectures[0]) if architectures else str(config.model_type)


def _reason_in_config(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only models are served"
    other = [name for name in _OTHER_INPUTS if getattr(config, name, None) is not None]
    if other and vision_family(config) is None:
        served = ", ".join(SERVED_FAMILIES)
        return f"it takes more than text ({', '.join(other)}), and is none of the families that are served: {served}"
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is not None:
        return "it uses latent attention (MLA), whose cache is not keys and values per head"
    if getattr(text, "alibi", False):
        return "it uses ALiBi position biases"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"{text.num_kv_shared_layers} of its layers share the keys and values of other layers"
    if getattr(text, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    if getattr(text, "add_cross_attention", False):
        return "it has cross-attention"
    return _reason_in_layer_types(text)


def _reason_in_layer_types(text: PretrainedConfig) -> str | None:
    for field in _LAYER_TYPE_FIELDS:
        kinds = getattr(text, field, None) or []
        if other := sorted({str(kind) for kind in kinds} - _SERVED_LAYER_TYPES):
            return f"it has layers of a kind that is not served ({field}: {', '.join(other)})"
    return None


def _reason_in_class(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    model = _build_without_weights(config, trust_remote_code)
    if model is None:
        return f"transformers has no {_KIND_NAMES[kind_of(config)]} for it"
    if getattr(model, "_is_stateful", False):
        return "it keeps recurrent state, which cannot be kept in blocks"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "it uses attention sinks"
    if not getattr(model, "_supports_attention_backend", False):
        return "its implementation does not run through transformers' AttentionInterface"
    return None


def _build_without_weights(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel | None:
    """The model on the meta device: its structure without its memory. None if there is no class for the config."""
    auto_class = kind_of(config).auto_class
    if not trust_remote_code and type(config) not in auto_class._model_mapping:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(  # type: ignore[no-untyped-call]  # left untyped
            config, trust_remote_code=trust_remote_code
        )
    return model
