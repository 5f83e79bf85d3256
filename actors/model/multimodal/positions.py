"""Positions of tokens for a model that numbers an image's tokens by frame, row and column.

Text tokens have consecutive positions. An image's tokens count from the next position along three axes, and the text
after the image goes on beyond the longest axis (Qwen2-VL, arXiv 2409.12191, section 2.1; get_rope_index of
transformers). So a token after an image has a smaller position than its index. The difference is the delta; it is the
same for all tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.core.requests.multimodal import MultiModalFeature


@dataclass(frozen=True, slots=True)
class GridPositions:
    """One request's positions.

    prompt: [3, num_prompt_tokens] int64
    delta:  added to the index of every token after the prompt
    """

    prompt: np.ndarray
    delta: int

    @classmethod
    def of_prompt(cls, features: Sequence[MultiModalFeature], num_prompt_tokens: int) -> GridPositions:
        """Place a prompt's tokens. features: its images, each with its grid."""
        prompt = np.empty((3, num_prompt_tokens), dtype=np.int64)
        delta = 0
        begin = 0
        for feature in features:
            assert feature.grid is not None, "an image's grid is missing, which this model's positions need"
            prompt[:, begin : feature.offset] = np.arange(begin, feature.offset) + delta
            start = feature.offset + delta
            prompt[:, feature.offset : feature.end] = np.indices(feature.grid).reshape(3, -1) + start
            delta = start + max(feature.grid) - feature.end
            begin = feature.end
        prompt[:, begin:] = np.arange(begin, num_prompt_tokens) + delta
        return cls(prompt, delta)

    def fill(self, positions: np.ndarray, start: int) -> None:
        """Write the positions of the request's n tokens from index start on. positions: [3, n], int64."""
        num_tokens = positions.shape[1]
        num_left = max(0, min(num_tokens, self.prompt.shape[1] - start))
        positions[:, :num_left] = self.prompt[:, start : start + num_left]
        positions[:, num_left:] = np.arange(start + num_left, start + num_tokens) + self.delta
