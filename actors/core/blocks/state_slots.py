"""The slots in which requests keep their recurrent states. A slot is a fixed number of blocks of the pool.

A request gets its slot together with its first blocks and gives it back together with them; in between the slot is its
own. The prefix cache names no block of a slot, but those of copies of slots (state_snapshots.py). A model without
recurrent layers has slots of no blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from actors.core.blocks.block_pool import KVCacheBlock
from actors.errors import IntegrityError


class StateSlots:
    """The slot of each request that holds one, by the request's id.

    num_blocks: of a slot; 0 for a model that keeps no recurrent state
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._slots: dict[str, list[KVCacheBlock]] = {}

    def __bool__(self) -> bool:
        """Whether requests have slots at all."""
        return self.num_blocks > 0

    def __iter__(self) -> Iterator[tuple[str, list[KVCacheBlock]]]:
        """Iterate over the requests that hold slots, with the blocks of each."""
        return iter(self._slots.items())

    def num_missing(self, request_id: str) -> int:
        """How many blocks the request's slot needs that it does not hold yet."""
        return 0 if request_id in self._slots else self.num_blocks

    def put(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Give a request its slot. blocks: num_missing() of them"""
        if blocks:
            self._slots[request_id] = blocks

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """Take a request's slot away, if it has one, and return the slot's blocks."""
        return self._slots.pop(request_id, [])

    def get_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """Return the blocks of a request's slot, in their order; empty if it has none."""
        return self._slots.get(request_id, [])

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return the ids of the blocks of a request's slot, in their order; empty if it has none."""
        return [block.block_id for block in self._slots.get(request_id, ())]

    def check_integrity(self, holders: Collection[str]) -> None:
        """Raise IntegrityError unless exactly the requests that hold blocks hold a whole slot. holders: their ids"""
        if self and self._slots.keys() != set(holders):
            raise IntegrityError(f"{sorted(self._slots.keys() ^ set(holders))} hold either blocks or a slot, not both")
        for request_id, blocks in self._slots.items():
            if len(blocks) != self.num_blocks:
                raise IntegrityError(f"{request_id} has a slot of {len(blocks)} blocks instead of {self.num_blocks}")
            if any(block.block_hash is not None for block in blocks):
                raise IntegrityError(f"the prefix cache names a block of the slot of {request_id}")
