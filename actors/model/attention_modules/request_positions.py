"""Tells attention modules that count positions by transformers' cache where each token of a flattened batch stands.

Llama 4 scales the queries of some layers by a token's position. Its attention takes the positions to be 0, 1, 2 ...
after the length of transformers' cache. raypd has no such cache, and the tokens of a step belong to many requests, so a
cache of this class stands in for it: its "length" is a number for each token, by which its position differs from its
place in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RequestPositions:
    """Stands in for transformers' cache in one forward pass; it stores nothing."""

    def __init__(self, positions: Tensor) -> None:
        """positions: [num_tokens] int64, of each token in its request"""
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return what to add to 0, 1, 2 ... to get the tokens' positions, [num_tokens] int64."""
        return self._offsets

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the step's own keys and values: the attention backend stores them."""
        return key, value
