"""Counts the tokens of waiting prompts that an engine will compute; a prefix that they share counts once."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Protocol

from actors.core.requests.block_hash import BlockHash
from actors.core.requests.request import Request

_MAX_HASHES: Final = 16_384
"""The most block hashes that one count takes in: a few milliseconds' work, twice a second."""


class CachedBlocks(Protocol):
    """The blocks of the KV cache, as far as they can be found by their hashes."""

    def is_cached(self, block_hash: BlockHash) -> bool:
        """Return whether the prefix cache has a block with this hash."""


class WaitingTokens:
    """The tokens of waiting prompts that will be computed, for one moment.

    A prefix counts once: it is cached already, or cached by the time at which the prompt's turn comes, since a request
    before it computes it, or has its KV loaded (arriving_prefixes.py). So requests are added in the order in which they
    have arrived. Once _MAX_HASHES block hashes have been taken in, further prompts are taken to share as much as those
    that were looked up.
    """

    def __init__(self, blocks: CachedBlocks | None, block_size: int) -> None:
        """Count none yet.

        blocks: None: a cached prefix cannot be told from its blocks, as for models with a recurrent state, and nothing
                is looked up
        """
        self._blocks = blocks
        self._block_size = block_size
        self._coming: set[BlockHash] = set()
        self._num_looked_up = 0
        self._num_found = 0
        self._num_others = 0

    @property
    def num_tokens(self) -> int:
        """The tokens to compute of all prompts that were added."""
        num_to_compute = self._num_looked_up - self._num_found
        if not self._num_others:
            return num_to_compute
        part = num_to_compute / self._num_looked_up if self._num_looked_up else 1.0
        return num_to_compute + round(part * self._num_others)

    def note_coming(self, request: Request) -> None:
        """Take in a request whose prompt is being computed, or comes from elsewhere: its blocks will be cached."""
        if self._blocks is not None and len(self._coming) < _MAX_HASHES:
            self._coming.update(request.block_hashes[:_MAX_HASHES])

    def add(self, request: Request) -> None:
        """Add a waiting request. The last token of its prompt is computed in any case."""
        blocks, coming = self._blocks, self._coming
        num_tokens = request.num_tokens - request.num_computed_tokens
        if blocks is None or len(coming) >= _MAX_HASHES:
            self._num_others += num_tokens
            return
        hashes = request.block_hashes
        self._num_looked_up += num_tokens
        if request.reads_prefix_cache:
            # Whoever has a block's hash has the blocks before it, too, apart from those that were evicted meanwhile.
            num_blocks = bisect_left(hashes, True, key=lambda one: one not in coming and not blocks.is_cached(one))
            num_there = min(num_blocks * self._block_size, request.num_tokens - 1)
            self._num_found += max(num_there - request.num_computed_tokens, 0)
        coming.update(hashes[:_MAX_HASHES])
