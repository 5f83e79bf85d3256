"""The places outside the KV cache where a request's prefix may be, stores and other engines' caches, for the scheduler.

The object only keeps state, in the engine thread: no call blocks or does I/O. A load goes through reserve(), start(),
its report, and end(), in this order; cancel() may come before the report. A reservation that is not started is ended
at once, by end(request_id, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.params import PrefixSource
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.stores.store_set import StoreSet


class PrefixSources:
    """Stores and fetches, either of which may be missing. A load comes from one of the two."""

    def __init__(self, stores: StoreSet | None, fetches: PrefixFetches | None) -> None:
        self.stores = stores
        self._fetches = fetches

    def reserve(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        source: PrefixSource | None = None,
        num_local_blocks: int = 0,
    ) -> int:
        """Reserve a load, and return how many of these blocks, from the first one on, it can bring; 0 if none.

        The source is preferred if fetching from it is worth it; otherwise stores bring what they have.
        block_hashes: of the request's next blocks, after its first num_local_blocks
        source:       an engine that probably has some of the blocks
        """
        num_stored = self.stores.reserve(request_id, block_hashes) if self.stores is not None else 0
        if source is None or self._fetches is None:
            return num_stored
        num_fetched = self._fetches.reserve(request_id, block_hashes, source, num_local_blocks, num_stored)
        if num_fetched and self.stores is not None:
            self.stores.end(request_id, 0)
        return num_fetched or num_stored

    def reserve_whole(
        self, request_id: str, block_names: Sequence[bytes], source: PrefixSource, num_spared_tokens: int
    ) -> bool:
        """Reserve a load of blocks that are of use together only; return False if fetching them is not worth it.

        No store has such blocks: the source sends all of them, or none.
        """
        return self._fetches is not None and self._fetches.reserve_whole(
            request_id, block_names, source, num_spared_tokens
        )

    def start(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Begin the load that was reserved, into these blocks of the KV cache."""
        if self._fetches is not None and self._fetches.start(request_id, block_ids):
            return
        assert self.stores is not None, "a load that is no fetch was reserved in stores"
        self.stores.start(request_id, block_ids)

    def cancel(self, request_id: str) -> None:
        """Cancel a load; its report still comes."""
        if self._fetches is not None and self._fetches.cancel(request_id):
            return
        assert self.stores is not None, "a load that is no fetch was reserved in stores"
        self.stores.cancel(request_id)

    def end(self, request_id: str, num_blocks: int) -> None:
        """End a load, which has brought so many blocks; 0 if it was not started. Unknown ones are ignored."""
        if not (self._fetches is not None and self._fetches.end(request_id, num_blocks)) and self.stores is not None:
            self.stores.end(request_id, num_blocks)

    def answer(self, want: WantedFetch, block_ids: Sequence[int]) -> None:
        """Send these blocks, perhaps none, to the engine that fetches them. The reports' key is want.answer_key."""
        assert self._fetches is not None, "an engine that has links to others has fetches"
        self._fetches.answer(want, block_ids)

    def observe_steps(self, num_tokens: int, seconds: Sequence[float]) -> None:
        """Note how long steps took that computed so many tokens each: fetches are compared with them."""
        if self._fetches is not None:
            self._fetches.observe_steps(num_tokens, seconds)

    def compute_s(self, num_tokens: int) -> float | None:
        """Return the seconds in which this engine computes so many tokens, as steps have shown; None if unknown."""
        return None if self._fetches is None else self._fetches.compute_s(num_tokens)

    @property
    def has_orders(self) -> bool:
        """Whether the next step's metadata has to begin, cancel or answer a load."""
        has_stored = self.stores is not None and self.stores.has_orders
        return has_stored or (self._fetches is not None and self._fetches.has_orders)

    def add_to(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata:
        """Return the metadata with everything that was collected for the worker side since the last call."""
        if self._fetches is not None:
            metadata = self._fetches.add_to(metadata)
        stores = None if self.stores is None else self.stores.take_metadata()
        return metadata if stores is None else replace(metadata, stores=stores)
