"""Where else a request's prefix may be: in stores, or in another engine's cache. What the scheduler sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.stores.messages import StoreMetadata


class PrefixSources(Protocol):
    """Bookkeeping only, in the engine thread: no call blocks or does I/O.

    A load: reserve() -> start() -> its report in KVConnectorOutput.finished_loading -> end(); a reservation that is not
    started ends at once, by end(request_id, 0).
    """

    def reserve(self, request_id: str, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first one on, can be brought."""

    def start(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Bring what was reserved into these blocks of the KV cache."""

    def cancel(self, request_id: str) -> None:
        """A load is not wanted any more; its report still comes."""

    def end(self, request_id: str, num_blocks: int) -> None:
        """A load brought so many blocks, or was not started."""

    def on_blocks_cached(self, block_hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """These blocks' KV is final, for as long as they are not evicted."""

    def on_block_evicted(self, block_hash: bytes, block_id: int) -> None:
        """This block is being given to somebody else, who writes it at the earliest in the step now being made."""

    def clear(self) -> None:
        """The prefix cache was reset: what is stored is not valid any more."""

    def take_metadata(self) -> StoreMetadata | None:
        """What the next step asks of the worker side, once; None if nothing."""
