"""Who has, as far as an ingress knows, the KV of which prefix.

It knows what it has sent where, not what engines have evicted since: what it says is a good guess, and those who act on
it find out. An engine's next life is another engine. Bounded, the prefixes used least recently forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from actors.core.block_hash import BlockHash
from cluster.engine_connection import EngineKey


class PrefixIndex:
    """Block hashes to the engines that have them. Every call costs O(1) per block."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[BlockHash, set[EngineKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, engine: EngineKey, block_hashes: Sequence[BlockHash]) -> None:
        """The engine has these blocks, the first of a prompt first."""
        # Last ones first, so that a prefix is forgotten from its end.
        for block_hash in reversed(block_hashes):
            self._holders.setdefault(block_hash, set()).add(engine)
            self._holders.move_to_end(block_hash)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def find(self, block_hashes: Sequence[BlockHash]) -> dict[EngineKey, int]:
        """How many of these blocks, from the first one on, each engine has; those that have none are left out."""
        found: dict[EngineKey, int] = {}
        holders: set[EngineKey] | None = None
        for index, block_hash in enumerate(block_hashes):
            here = self._holders.get(block_hash, set())
            holders = set(here) if holders is None else holders & here
            if not holders:
                break
            found.update(dict.fromkeys(holders, index + 1))
        return found
