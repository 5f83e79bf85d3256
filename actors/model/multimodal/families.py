"""The families of vision-language models that are served.

Each family has an encoder that transformers can run alone (get_image_features). The encoder's embeddings replace those
of placeholder tokens in an otherwise ordinary decoder. The families differ in how placeholders' positions are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from transformers import PretrainedConfig

from actors.core.requests.request_limits import ImageFacts


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of models. has_grid_positions: an image's tokens have positions by frame, row and column (M-RoPE)."""

    has_grid_positions: bool


_FAMILIES: Final = {
    "llava": VisionFamily(has_grid_positions=False),
    "qwen2_vl": VisionFamily(has_grid_positions=True),
    "qwen2_5_vl": VisionFamily(has_grid_positions=True),
}
_FIXED_SIZE_ENCODERS: Final = ("clip_vision_model", "siglip_vision_model")
SERVED_FAMILIES: Final = tuple(_FAMILIES)


def vision_family(config: PretrainedConfig) -> VisionFamily | None:
    """Return the family of a model that takes images; None if the model takes none, or if its family is not served."""
    return _FAMILIES.get(str(config.model_type))


def image_facts(config: PretrainedConfig, hidden_size: int) -> ImageFacts:
    """Return the inputs that a model's image encoder takes. hidden_size: size of the language model's embeddings."""
    vision = config.vision_config
    patch_size = getattr(vision, "patch_size", None)
    if _FAMILIES[str(config.model_type)].has_grid_positions:
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        patch = channels * vision.temporal_patch_size * vision.patch_size**2
        return ImageFacts(hidden_size, (None, patch), grid_merge_size=vision.spatial_merge_size)
    if str(vision.model_type) not in _FIXED_SIZE_ENCODERS or not patch_size:
        return ImageFacts(hidden_size)
    size = vision.image_size
    has_class_embedding = config.vision_feature_select_strategy == "full" and vision.model_type == "clip_vision_model"
    num_embeds = (size // patch_size) ** 2 + has_class_embedding
    return ImageFacts(hidden_size, (1, vision.num_channels, size, size), num_embeds)


def image_token_id(config: PretrainedConfig) -> int:
    """Return the token that stands for an image in a prompt."""
    return int(config.image_token_id)
