"""The families of vision-language models that are served.

Each has an encoder that transformers runs by itself (get_image_features), and whose embeddings stand in the place of
placeholder tokens of an otherwise ordinary decoder. What differs is how a placeholder's position is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """has_grid_positions: an image's tokens are placed by frame, row and column (M-RoPE), not one after the other."""

    has_grid_positions: bool


_FAMILIES: Final = {
    "llava": VisionFamily(has_grid_positions=False),
    "qwen2_vl": VisionFamily(has_grid_positions=True),
    "qwen2_5_vl": VisionFamily(has_grid_positions=True),
}
SERVED_FAMILIES: Final = tuple(_FAMILIES)


def vision_family(config: PretrainedConfig) -> VisionFamily | None:
    """The family of a model that takes images; None if it takes none, or if its family is not served."""
    return _FAMILIES.get(str(config.model_type))


def image_token_id(config: PretrainedConfig) -> int:
    """The token that stands for an image in a prompt."""
    return int(config.image_token_id)
