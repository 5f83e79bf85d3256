"""The models of text with images or sound that are served as language models: only their text part is read.

For most of them transformers has a class for the text part alone, which reads the same files and leaves out the
encoders' weights. Its config is the text_config of config.json, with what the whole model's config says for all parts.
Gemma 4's own class can do without encoders: its config is the whole one without theirs.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

from transformers import PretrainedConfig

SERVED_AS_TEXT: Final = ("gemma3n", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe")
"""The model types of such models."""

_ENCODERS: Final = {"vision_config": "images", "audio_config": "sound"}
_TIED_BY_TEXT: Final = {"llama4"}
"""The models in which the text part itself has the output layer, and says whether its weights are the embeddings'."""
_WITHOUT_ENCODERS: Final = {"gemma4"}
"""The models whose class is the same with encoders and without."""
_HEADS: Final = ("ForConditionalGeneration", "ForCausalLM")
_IN_NAME: Final = re.compile(r"(model\\?\.)?\blanguage_model\\?\.(?![*+?{])(model\\?\.)?")
_BEFORE_WILDCARD: Final = re.compile(r"\blanguage_model(?=\.[*+?{])")


def as_text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the part of a model that is served: the config itself, or a copy of its text part's."""
    name = (getattr(config, "architectures", None) or [_HEADS[0]])[0]
    left_out = [kind for field, kind in _ENCODERS.items() if getattr(config, field, None) is not None]
    if config.model_type not in SERVED_AS_TEXT or not left_out or not name.endswith(_HEADS):
        return config
    part = _without_encoders(config) if config.model_type in _WITHOUT_ENCODERS else _text_of(config)
    part.left_out_inputs = left_out
    return part


def left_out_inputs(config: PretrainedConfig) -> str:
    """Return which inputs of a model are not served ("images and sound"); empty if that is none."""
    return " and ".join(getattr(config, "left_out_inputs", ()))


def _without_encoders(config: PretrainedConfig) -> PretrainedConfig:
    config = copy.deepcopy(config)
    for field in _ENCODERS:
        setattr(config, field, None)
    text = config.get_text_config(decoder=True)
    if text.use_bidirectional_attention == "vision":
        # Only an image's tokens attend to later ones.
        text.use_bidirectional_attention = None
    return config


def _text_of(config: PretrainedConfig) -> PretrainedConfig:
    text = copy.deepcopy(config.get_text_config(decoder=True))
    text.architectures = getattr(config, "architectures", None)
    text.dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    if config.model_type not in _TIED_BY_TEXT:
        text.tie_word_embeddings = config.tie_word_embeddings
    if (eos := getattr(config, "eos_token_id", None)) is not None:
        text.eos_token_id = eos
    if (settings := getattr(config, "quantization_config", None)) is not None:
        plain = settings if isinstance(settings, dict) else settings.to_dict()
        text.quantization_config = _with_names_of_text_part(plain)
    return text


def _with_names_of_text_part(settings: Any) -> Any:  # JSON
    """Return the settings with the layers' names, and regular expressions for them, as the text part has them."""
    if isinstance(settings, dict):
        return {_with_names_of_text_part(key): _with_names_of_text_part(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_with_names_of_text_part(value) for value in settings]
    if isinstance(settings, str):
        return _BEFORE_WILDCARD.sub("", _IN_NAME.sub(_name_in_text_part, settings))
    return settings


def _name_in_text_part(match: re.Match[str]) -> str:
    before, after = match.groups()
    return str(before or after or "")
