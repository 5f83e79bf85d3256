"""What the two sides of an engine's stores say to each other, inside the connector's metadata and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kv_transfer.ranges import MAX_ITEMS, Clock, Count, LongText, ShortBytes, Total, WireName


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """Worker -> scheduler, the one and only report on a load: so many of its blocks, from the first on, are in place.

    After it nothing writes any of them. A cancelled load reports as well.
    """

    num_blocks: Count
    reason: LongText = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, in one store (its place in the list of stores) and in the KV cache."""

    store: Count
    block_hash: ShortBytes
    block_id: Count


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Scheduler -> worker: fill these blocks, the request's next ones after those that it has."""

    request_id: WireName
    blocks: Annotated[tuple[StoredBlock, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """What one step asks of the stores, in this order.

    dropped:    (store, block hash)
    saves:      copied out before anything of this step, or later, writes these blocks
    loads, cancelled_loads: by request id
    """

    dropped: Annotated[tuple[tuple[Count, ShortBytes], ...], Meta(max_length=MAX_ITEMS)] = ()
    saves: Annotated[tuple[StoredBlock, ...], Meta(max_length=MAX_ITEMS)] = ()
    loads: Annotated[tuple[BlockLoad, ...], Meta(max_length=MAX_ITEMS)] = ()
    cancelled_loads: Annotated[tuple[WireName, ...], Meta(max_length=MAX_ITEMS)] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.dropped or self.saves or self.loads or self.cancelled_loads)


@dataclass(slots=True)
class StoreStats:
    """Counters of one rank's stores since they started, and how long loads took."""

    num_saved_blocks: Total = 0
    num_unsaved_blocks: Total = 0
    """Blocks that a store had no room, or no time, for."""
    num_loaded_blocks: Total = 0
    num_missing_blocks: Total = 0
    """Blocks that were to be loaded and did not come."""
    num_loaded_bytes: Total = 0
    load_s: Clock = 0.0
