"""Items of a prompt that an encoder turns into embeddings: where they stand and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from kv_transfer.message_ranges import Bulk, Count, PositiveCount, Word

EMBEDDINGS: Final = "embeddings"
"""The name, among an EncoderInput's arrays, of embeddings that an encode engine has made already."""


@dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """One image, or another item.

    mm_hash:    hash of its content: equal items are encoded once
    offset, length: position and number of its placeholder tokens in the prompt
    num_embeds: embeddings that the encoder makes of it; the encoder's budget and cache count these
    grid:       (frames, rows, columns) of its tokens, for models whose positions depend on them
    """

    mm_hash: Word
    offset: Count
    length: PositiveCount
    num_embeds: PositiveCount
    grid: tuple[PositiveCount, PositiveCount, PositiveCount] | None = None

    @property
    def encoder_key(self) -> str:
        """The key of its embeddings in the encoder cache; an item with another number of embeddings has another key."""
        return f"{self.mm_hash}/{self.num_embeds}"

    @property
    def end(self) -> int:
        """The position of the first token after the item."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PackedArray:
    """A numpy array as messages carry it.

    dtype: numpy's name of it; data: the elements in C order, little-endian
    """

    dtype: Word
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data: Bulk


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An item as the model's processor prepared it for the encoder.

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
    """Say what is wrong with a prompt's items, or return None. They stand in order and do not overlap."""
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
