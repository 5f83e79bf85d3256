"""Items of a prompt that an encoder turns into embeddings: where they stand and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """One image, or another item.

    mm_hash:    names its content: equal items are encoded once
    offset, length: the prompt's placeholder tokens that it stands for
    num_embeds: embeddings that the encoder makes of it; what the encoder's budget and cache count
    """

    mm_hash: str
    offset: int
    length: int
    num_embeds: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.offset + self.length


def find_feature_mistake(features: Sequence[MultiModalFeature], num_prompt_tokens: int) -> str | None:
    """Say what is wrong with a prompt's items, or return None. They stand in order and do not overlap."""
    end = 0
    for number, feature in enumerate(features):
        if feature.length <= 0 or feature.num_embeds <= 0:
            return f"multimodal item {number} has {feature.length} tokens and {feature.num_embeds} embeddings"
        if feature.offset < end:
            return f"multimodal item {number} begins at token {feature.offset}, the one before it ends at {end}"
        end = feature.end
    if end > num_prompt_tokens:
        return f"multimodal item {len(features) - 1} ends at token {end}, the prompt at {num_prompt_tokens}"
    return None
