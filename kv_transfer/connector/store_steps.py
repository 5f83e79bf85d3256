"""The values that the two sides of an engine's stores exchange, inside the connector's metadata and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kv_transfer.message_ranges import MAX_ITEMS, Clock, Count, LongText, ShortBytes, Total, WireName


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """Worker -> scheduler: how many of a load's blocks, from the first one on, are in place.

    This is the one and only report of a load; a cancelled load reports as well. Afterwards nothing writes the blocks.

    reason: why blocks are missing; empty if none is
    """

    num_blocks: Count
    reason: LongText = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, in a store and in the KV cache.

    store: the store's index in the list of the engine's stores
    """

    store: Count
    block_hash: ShortBytes
    block_id: Count


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Scheduler -> worker: fill these blocks from stores. They follow the blocks whose KV the request already has."""

    request_id: WireName
    blocks: Annotated[tuple[StoredBlock, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """All that one step asks of the stores, in this order.

    dropped:         (store, block hash) of blocks that a store has to forget
    saves:           blocks to copy out before anything of this step, or later, writes them
    cancelled_loads: ids of requests whose loads are not wanted any more
    """

    dropped: Annotated[tuple[tuple[Count, ShortBytes], ...], Meta(max_length=MAX_ITEMS)] = ()
    saves: Annotated[tuple[StoredBlock, ...], Meta(max_length=MAX_ITEMS)] = ()
    loads: Annotated[tuple[BlockLoad, ...], Meta(max_length=MAX_ITEMS)] = ()
    cancelled_loads: Annotated[tuple[WireName, ...], Meta(max_length=MAX_ITEMS)] = ()

    def is_empty(self) -> bool:
        """Return whether the stores have nothing to do."""
        return not (self.dropped or self.saves or self.loads or self.cancelled_loads)


@dataclass(slots=True)
class StoreStats:
    """Counters of one rank's stores since they started.

    load_s: seconds that loads have taken, all together
    """

    num_saved_blocks: Total = 0
    num_unsaved_blocks: Total = 0
    """Blocks that were to be saved and were not: the store could not take them, or failed."""
    num_loaded_blocks: Total = 0
    num_missing_blocks: Total = 0
    """Blocks that were to be loaded and did not come."""
    num_loaded_bytes: Total = 0
    load_s: Clock = 0.0
