"""What the two sides of an engine's stores say to each other, inside the connector's metadata and output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """Worker -> scheduler, the one and only report on a load: so many of its blocks, from the first on, are in place.

    After it nothing writes any of them. A cancelled load reports as well.
    """

    num_blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, in one store (its place in the list of stores) and in the KV cache."""

    store: int
    block_hash: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Scheduler -> worker: fill these blocks, the request's next ones after those that it has."""

    request_id: str
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """What one step asks of the stores, in this order.

    dropped:    (store, block hash)
    saves:      copied out before anything of this step, or later, writes these blocks
    loads, cancelled_loads: by request id
    """

    dropped: tuple[tuple[int, bytes], ...] = ()
    saves: tuple[StoredBlock, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    cancelled_loads: tuple[str, ...] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.dropped or self.saves or self.loads or self.cancelled_loads)


@dataclass(slots=True)
class StoreStats:
    """Counters of one rank's stores since they started, and how long loads took."""

    num_saved_blocks: int = 0
    num_unsaved_blocks: int = 0
    """Blocks that a store had no room, or no time, for."""
    num_loaded_blocks: int = 0
    num_missing_blocks: int = 0
    """Blocks that were to be loaded and did not come."""
    num_loaded_bytes: int = 0
    load_s: float = 0.0
