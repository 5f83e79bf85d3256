"""Remembers which prefixes' KV each engine has, as far as an ingress knows.

The index knows which prompts went to which engine, but not what the engine has evicted since. So its answer is a guess:
an engine that has less than the index says computes the rest. Each incarnation of an engine is an engine of its own to
the index. The index is bounded: it forgets the prefixes that were used least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from actors.core.requests.block_hash import BlockHash
from cluster.routing.engine_connection import EngineKey


class PrefixIndex:
    """A map from block hashes to the engines that have the blocks. Every call costs O(1) per block."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Blocks that came together share one set, since a prompt has hundreds of blocks.
        self._holders: OrderedDict[BlockHash, frozenset[EngineKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, engines: Iterable[EngineKey], block_hashes: Sequence[BlockHash]) -> None:
        """Note that these engines have these blocks. block_hashes: of a prompt, beginning with its first block"""
        holders, new = self._holders, frozenset(engines)
        # The last block is added first, so that a prefix is forgotten from its end.
        for block_hash in reversed(block_hashes):
            known = holders.pop(block_hash, new)
            holders[block_hash] = known if known is new or known >= new else known | new
        while len(holders) > self._max_blocks:
            holders.popitem(last=False)

    def find(self, block_hashes: Sequence[BlockHash]) -> dict[EngineKey, int]:
        """Return how many of these blocks, from the first one on, each engine has, without engines that have none."""
        found: dict[EngineKey, int] = {}
        holders: frozenset[EngineKey] = frozenset()
        for index, block_hash in enumerate(block_hashes):
            here = self._holders.get(block_hash, frozenset())
            if index == 0:
                holders = here
            elif not (here is holders or here >= holders):
                found.update(dict.fromkeys(holders - here, index))
                holders &= here
            if not holders:
                return found
        found.update(dict.fromkeys(holders, len(block_hashes)))
        return found
