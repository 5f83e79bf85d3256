"""Small checkpoints of models with encoders for images or sound, as transformers' own multimodal classes save them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn
from transformers import AutoModel, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.gemma3n import modeling_gemma3n

_QWEN_VISION: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_GEMMA_VISION: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
ENCODERS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "gemma3n": {
        "vision_config": {"hidden_size": 16, "vocab_size": 2},
        "audio_config": {
            "hidden_size": 16,
            "vocab_size": 2,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [4, 4],
        },
    },
    "gemma4": {
        "vision_config": _GEMMA_VISION,
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 16,
            "subsampling_conv_channels": [4, 4],
        },
    },
    "llama4": {
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "image_size": 16,
            "patch_size": 4,
        }
    },
    "qwen3_5": {"vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION},
}
"""The fields of small encoders, by model type."""


class _ImagesByTimm:
    """The class AutoModel, but for Gemma 3n's encoder of images: the package timm has it, and text does not need it."""

    @staticmethod
    def from_config(config: PretrainedConfig) -> nn.Module:
        if config.model_type == "gemma3n_vision":
            return nn.Linear(config.hidden_size, config.hidden_size)
        model: nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]  # left untyped
        return model


@contextmanager
def without_timm() -> Iterator[None]:
    """Inside, transformers can build Gemma 3n with images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n, "AutoModel", _ImagesByTimm)
        yield


class MultimodalClass:
    """Use as an auto_class: transformers' class for images and text, in which Gemma 3n can be built without timm."""

    @staticmethod
    def from_config(config: PretrainedConfig, **settings: Any) -> Any:
        with without_timm():
            return AutoModelForImageTextToText.from_config(config, **settings)  # type: ignore[no-untyped-call]

    @staticmethod
    def from_pretrained(directory: Path, **settings: Any) -> Any:
        with without_timm():
            return AutoModelForImageTextToText.from_pretrained(directory, **settings)
