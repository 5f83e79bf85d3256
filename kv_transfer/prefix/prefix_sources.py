"""Where else a request's prefix may be, in stores or in another engine's cache: what the scheduler sees of them.

Bookkeeping only, in the engine thread: no call blocks or does I/O. A load goes reserve() -> start() -> its report
-> end(); a reservation that is not started ends at once, by end(request_id, 0).
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
    """Either may be missing."""

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
        """How many of these, from the first one on, can be brought: by the source if that is worth it, or by stores.

        block_hashes: of the request's next blocks, after its first num_local_blocks
        source: an engine that is thought to have some of them
        """
        num_stored = self.stores.reserve(request_id, block_hashes) if self.stores is not None else 0
        if source is None or self._fetches is None:
            return num_stored
        num_fetched = self._fetches.reserve(request_id, block_hashes, source, num_local_blocks, num_stored)
        if num_fetched and self.stores is not None:
            self.stores.end(request_id, 0)
        return num_fetched or num_stored

    def start(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Bring what was reserved into these blocks of the KV cache."""
        if self._fetches is not None and self._fetches.start(request_id, block_ids):
            return
        assert self.stores is not None, "somebody has reserved it"
        self.stores.start(request_id, block_ids)

    def cancel(self, request_id: str) -> None:
        """A load is not wanted any more; its report still comes."""
        if self._fetches is not None and self._fetches.cancel(request_id):
            return
        assert self.stores is not None, "somebody has reserved it"
        self.stores.cancel(request_id)

    def end(self, request_id: str, num_blocks: int) -> None:
        """A load brought so many blocks, or was not started."""
        if not (self._fetches is not None and self._fetches.end(request_id, num_blocks)) and self.stores is not None:
            self.stores.end(request_id, num_blocks)

    def answer(self, want: WantedFetch, block_ids: Sequence[int]) -> None:
        """Send another engine these blocks, perhaps none. Reports on that have the want's answer_key."""
        assert self._fetches is not None, "an engine that has links to others has fetches"
        self._fetches.answer(want, block_ids)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens: what that takes decides whether others are asked instead."""
        if self._fetches is not None:
            self._fetches.observe_step(num_tokens, seconds)

    def add_to(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata:
        """The metadata with what was collected for the worker side, once."""
        if self._fetches is not None:
            metadata = self._fetches.add_to(metadata)
        stores = None if self.stores is None else self.stores.take_metadata()
        return metadata if stores is None else replace(metadata, stores=stores)
