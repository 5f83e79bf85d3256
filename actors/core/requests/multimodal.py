"""Images of a prompt, which an encoder turns into embeddings: their positions and sizes, and the encoder's inputs.

Messages and names follow vLLM, which calls an image, or anything like it, a multimodal item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from kv_transfer.message_ranges import Bulk, Count, PositiveCount, Word

EMBEDDINGS: Final = "embeddings"
"""The key, in EncoderInput.arrays, of embeddings that an encode engine has already computed."""


@dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """One image of a prompt.

    mm_hash:    hash of the image's content; equal images are encoded once
    offset, length: position of the image's first placeholder token in the prompt, and their number
    num_embeds: how many embeddings the encoder makes of the image; the encoder's budget and cache count these
    grid:       (frames, rows, columns) of the image's tokens, for models whose positions depend on them
    """

    mm_hash: Word
    offset: Count
    length: PositiveCount
    num_embeds: PositiveCount
    grid: tuple[PositiveCount, PositiveCount, PositiveCount] | None = None

    @property
    def encoder_key(self) -> str:
        """The key of the image's embeddings in the encoder cache; it differs for another number of embeddings."""
        return f"{self.mm_hash}/{self.num_embeds}"

    @property
    def end(self) -> int:
        """The position of the first token after the item."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PackedArray:
    """A numpy array in a message.

    dtype: numpy's name of the dtype
    data: the elements in C order, little-endian
    """

    dtype: Word
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data: Bulk


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An image as the model's processor prepared it for the encoder.

    arrays: the encoder's arguments, by name
    """

    mm_hash: Word
    arrays: Annotated[dict[Word, PackedArray], Meta(max_length=16)]

    @property
    def size_bytes(self) -> int:
        """The size of all arrays together."""
        return sum(len(array.data) for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the model's processor prepared it.

    arrays: see EncoderInput; num_tokens: the image's placeholder tokens in a prompt; grid: see MultiModalFeature
    """

    arrays: Annotated[dict[Word, PackedArray], Meta(max_length=16)]
    num_tokens: PositiveCount
    grid: tuple[PositiveCount, PositiveCount, PositiveCount] | None = None

    @property
    def size_bytes(self) -> int:
        """The size of all arrays together."""
        return sum(len(array.data) for array in self.arrays.values())


def find_feature_mistake(features: Sequence[MultiModalFeature], num_prompt_tokens: int) -> str | None:
    """Return what is wrong with a prompt's images, or None. They have to be in order and must not overlap."""
    end = 0
    for number, feature in enumerate(features):
        if feature.grid is not None and math.prod(feature.grid) != feature.length:
            return f"multimodal item {number} has {feature.length} tokens, its grid is {feature.grid}"
        if feature.length <= 0 or feature.num_embeds <= 0:
            return f"multimodal item {number} has {feature.length} tokens and {feature.num_embeds} embeddings"
        if feature.offset < end:
            return f"multimodal item {number} begins at token {feature.offset}, the one before it ends at {end}"
        end = feature.end
    if end > num_prompt_tokens:
        return f"multimodal item {len(features) - 1} ends at token {end}, the prompt at {num_prompt_tokens}"
    return None
