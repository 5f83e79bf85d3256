"""Refuses models that cannot be served, with the reason, before their weights are read.

What passes here still has to prove itself: the geometry probe and the self-check run the loaded model.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.attention.batch_attention import ATTENTION_NAME
from actors.model.config.class_facts import WITH_BATCH_DELIVERED, WITH_REPLACED_ATTENTION, WITHOUT_ATTENTION
from actors.model.config.config_rules import architecture_name, is_recurrence_unserved, refuse_by_config
from actors.model.config.model_kind import kind_of
from actors.model.errors import UnsupportedModel
from actors.model.multimodal.families import vision_family


def refuse_unsupported(config: PretrainedConfig, *, trust_remote_code: bool, tp_size: int = 1) -> None:
    """Raise UnsupportedModel if the config or the model's class shows that the engine cannot serve the model."""
    refuse_by_config(config, tp_size)
    if (reason := _reason_in_class(config, trust_remote_code)) is not None:
        raise UnsupportedModel(architecture_name(config), reason)


def attention_choice(config: PretrainedConfig) -> str | dict[str, str]:
    """Return the attention that each part of the model uses: ours for the decoder, torch's for an image encoder.

    A model whose attention cannot be named is built with its own; batch_delivery.py replaces it during a forward.
    """
    if config.model_type in WITH_REPLACED_ATTENTION:
        return "eager"
    if vision_family(config) is None:
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def _reason_in_class(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    model = _build_without_weights(config, trust_remote_code)
    if model is None:
        return "transformers has no class for it"
    if getattr(model, "_is_stateful", False) and is_recurrence_unserved(config):
        return f"it keeps recurrent state of a kind that is not served ({config.model_type})"
    is_reached = config.model_type in WITH_BATCH_DELIVERED | WITHOUT_ATTENTION or getattr(
        model, "_supports_attention_backend", False
    )
    if not is_reached:
        return "its implementation does not run through transformers' AttentionInterface"
    return None


def _build_without_weights(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel | None:
    """Build the model on the meta device, without its weights; None if transformers has no class for the config."""
    auto_class = kind_of(config).auto_class
    if not trust_remote_code and type(config) not in auto_class._model_mapping:
        return None
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class.from_config(  # type: ignore[no-untyped-call]  # left untyped
                config, trust_remote_code=trust_remote_code
            )
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError) as error:
        raise UnsupportedModel(
            architecture_name(config), f"transformers cannot build it from its config: {error!r}"
        ) from error
    return model
