"""Transfers of images' embeddings between engines, and the blocks that they take at both ends.

An engine that prefills fetches the embeddings of an image from the encode engine that computed them
(actors/sessions/remote_encoding.py). The bytes go through blocks of both engines' KV caches
(kv_transfer/sides/staged_bytes.py), which belong to no request:

    fetching engine   queued -> loading (blocks reserved, READY sent) -> over: bytes read, blocks free
    encode engine     wanted (READY came) -> sending (blocks staged) -> over: bytes sent, blocks free

An engine without free blocks waits for them, up to a deadline. After the deadline the encode engine sends nothing; the
fetching engine reports why it got nothing, and encodes the image itself. A fetch that is under way at its deadline is
cancelled, and its blocks are free when the transfer has drained.

A transfer takes blocks only if the running requests and the first waiting one have enough without them, so images
never delay requests. The blocks are pinned, but they become free without any further block: the bytes go into blocks
that the fetching engine has reserved before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.outputs.scheduler_stats import EmbeddingStats
from actors.core.queue.request_queue import RequestQueue
from actors.core.queue.scheduler_queues import Queues
from kv_transfer.connector.fetches import BytesFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import FinishedReceiving
from kv_transfer.connector.steps import KVConnectorMetadata, Reservation, StagedBytes
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.prefix.prefix_fetch import FetchAnswer, add_fetches
from kv_transfer.transfer_stats import TransferTimings

_MAX_STAGED: Final = 0.5
"""Largest part of all blocks that transfers of embeddings may hold."""
_NUM_STEPS: Final = 8
"""About how many steps a transfer takes; the blocks that running requests need in that time are left to them."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The values that an engine needs to send and fetch embeddings.

    identity: the prefix of the ids of the engine's fetches, which no other engine has
    slot_size_bytes: size of one token's KV in the cache
    kept_embeddings: the embeddings that other engines fetch from this one
    """

    identity: str
    slot_size_bytes: int
    kept_embeddings: KeptEmbeddings


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch.

    data: the bytes; None if the fetch failed
    reason: why the fetch failed; empty if it did not
    timings: None if no transfer was completed
    """

    data: bytes | None
    reason: str = ""
    timings: TransferTimings | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingFetch:
    """A fetch of one image's embeddings.

    peer: the engine that has them
    num_bytes: size of the embeddings
    deadline_s: seconds by the engine's clock
    on_over: called once with the result, on the engine's thread
    """

    peer: EngineAddress
    mm_hash: str
    num_bytes: int
    deadline_s: float
    on_over: Callable[[Fetched], None]


@dataclass(frozen=True, slots=True)
class _Want:
    want: WantedFetch
    mm_hash: str
    deadline_s: float


class EmbeddingTransfers:
    """The transfers of embeddings of one engine; only the engine thread may call it."""

    def __init__(self, staging: Staging | None, kv_cache_manager: KVCacheManager, want_timeout_s: float) -> None:
        """Begin without transfers.

        staging: None if the engine fetches and sends nothing
        want_timeout_s: how long another engine's fetch waits here for free blocks
        """
        self._staging = staging
        self._kv = kv_cache_manager
        self._want_timeout_s = want_timeout_s
        self._queued: dict[EmbeddingFetch, None] = {}
        self._loading: dict[TransferKey, EmbeddingFetch] = {}
        self._cancelled: dict[TransferKey, str] = {}
        """Why each cancelled fetch ends, for fetches that are still loading."""
        self._wants: dict[TransferKey, _Want] = {}
        self._sending: set[TransferKey] = set()
        self._num_started = 0
        self._reservations: list[Reservation] = []
        self._cancels: list[TransferKey] = []
        self._answers: list[FetchAnswer] = []
        self._staged: list[StagedBytes] = []
        self.stats = EmbeddingStats()

    # -- from the engine that encodes to the one that fetches ----------------------------------------------------

    def begin(self, fetch: EmbeddingFetch) -> None:
        """Fetch an image's embeddings as soon as enough blocks are free."""
        if self._staging is None:
            fetch.on_over(Fetched(None, "this engine has no links to other engines"))
        elif self._num_blocks_for(fetch) > self._max_num_blocks:
            self._fail(fetch, f"embeddings of {fetch.num_bytes} bytes do not fit into half of the KV cache")
        else:
            self._queued[fetch] = None

    def cancel(self, fetch: EmbeddingFetch, reason: str = "it is not wanted any more") -> None:
        """End a fetch, if it is not over. Its on_over() is called when the fetch holds no blocks any more."""
        if fetch in self._queued:
            del self._queued[fetch]
            self._fail(fetch, reason)
            return
        for key, loading in self._loading.items():
            if loading is fetch and key not in self._cancelled:
                self._cancelled[key] = reason
                self._cancels.append(key)

    def on_want(self, want: WantedFetch, mm_hash: str, now_s: float) -> None:
        """Note another engine's fetch of an image's embeddings; proceed() answers it."""
        key = want.answer_key
        if self._staging is not None and key not in self._wants and key not in self._sending:
            self._wants[key] = _Want(want, mm_hash, now_s + self._want_timeout_s)

    # -- steps ---------------------------------------------------------------------------------------------------

    def proceed(self, queues: Queues, blocked: RequestQueue, now_s: float) -> None:
        """Begin transfers for which there is room, and give up overdue ones. The scheduler calls this before each step.

        blocked: consumers that wait beside `queues`
        """
        if not (self._queued or self._loading or self._wants):
            return
        for fetch in [fetch for fetch in (*self._queued, *self._loading.values()) if fetch.deadline_s <= now_s]:
            self.cancel(fetch, "the embeddings did not come in time")
        num_spare_blocks = self._num_spare_blocks(queues, blocked)
        # Fetches are answered in the order of their arrival: otherwise the engine might never send a large image.
        for key, wanted in list(self._wants.items()):
            num_blocks_sent = self._answer(wanted, num_spare_blocks, is_late=wanted.deadline_s <= now_s)
            if num_blocks_sent is None:
                break
            del self._wants[key]
            num_spare_blocks -= num_blocks_sent
        for fetch in list(self._queued):
            num_blocks = self._num_blocks_for(fetch)
            if num_blocks > num_spare_blocks:
                break
            num_spare_blocks -= num_blocks
            self._start(fetch, num_blocks)

    def add_to(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata:
        """Return the step's metadata with the fetches and answers collected since the last call."""
        if not (self._reservations or self._cancels or self._answers):
            return metadata
        metadata = add_fetches(metadata, self._reservations, self._cancels, self._answers)
        metadata = replace(metadata, staged=tuple(self._staged))
        self._reservations, self._cancels, self._answers, self._staged = [], [], [], []
        return metadata

    def on_sent(self, key: TransferKey) -> bool:
        """Free the blocks of a transfer that has sent its embeddings, or failed. Returns whether it was under way."""
        if key not in self._sending:
            return False
        self._sending.remove(key)
        self._kv.pins.unpin(key)
        return True

    def on_received(self, report: FinishedReceiving) -> bool:
        """End a fetch and free its blocks, which no link uses any more. Returns whether the fetch was under way."""
        key, received, data = report.key, report.received, report.data
        fetch = self._loading.pop(key, None)
        if fetch is None:
            return False
        self._kv.pins.unpin(key)
        reason = self._cancelled.pop(key, "") or received.reason
        if data is None:
            self._fail(
                fetch,
                reason
                or "the encode engine has no free blocks for the image, or does not keep its embeddings any more",
            )
        else:
            self.stats.num_received += 1
            fetch.on_over(Fetched(data[: fetch.num_bytes], timings=received.timings))
        return True

    # -- questions -----------------------------------------------------------------------------------------------

    def is_sending(self, key: TransferKey) -> bool:
        """Whether embeddings are being sent under this key."""
        return key in self._sending

    def __bool__(self) -> bool:
        """Whether any transfer or fetch is under way."""
        return bool(self._queued or self._loading or self._wants or self._sending)

    def holders(self) -> set[TransferKey]:
        """The transfers that hold blocks."""
        return {*self._loading, *self._sending}

    def num_blocks(self) -> int:
        """Return how many blocks the transfers hold; preemption cannot free them."""
        return sum(self._kv.pins.num_pinned_by(key) for key in self.holders())

    def next_deadline(self) -> float | None:
        """Return the earliest deadline by the engine's clock, in seconds; None if there is none."""
        if not (self._queued or self._loading or self._wants):
            return None
        loading = (fetch for key, fetch in self._loading.items() if key not in self._cancelled)
        deadlines = [fetch.deadline_s for fetch in (*self._queued, *loading)]
        return min([*deadlines, *(wanted.deadline_s for wanted in self._wants.values())], default=None)

    # -- one transfer --------------------------------------------------------------------------------------------

    def _start(self, fetch: EmbeddingFetch, num_blocks: int) -> None:
        assert self._staging is not None, "no fetch is queued without staging"
        del self._queued[fetch]
        self._num_started += 1
        transfer_id = f"embeddings-{self._staging.identity}-{self._num_started}"
        key = TransferKey(TransferKind.BYTES_FETCH, transfer_id)
        self._loading[key] = fetch
        params = KVTransferParams(transfer_id, 0, TransferRole.CONSUMER, fetch.peer)
        block_ids = tuple(self._kv.pins.pin_free(key, num_blocks))
        num_tokens = self._num_tokens_for(fetch.num_bytes)
        wanted = BytesFetch(transfer_id, fetch.mm_hash)
        self._reservations.append(Reservation(key, params, block_ids, 0, num_tokens, wanted))

    def _answer(self, wanted: _Want, num_spare_blocks: int, *, is_late: bool) -> int | None:
        """Answer another engine's fetch. Returns how many blocks that takes, or None if there is no room for it yet."""
        assert self._staging is not None, "no fetch of another engine is noted without staging"
        want = wanted.want
        embeddings = self._staging.kept_embeddings.get(wanted.mm_hash)
        num_tokens = 0 if embeddings is None else self._num_tokens_for(len(embeddings.data))
        if is_late or self._kv.num_blocks_for(num_tokens) > self._max_num_blocks:
            embeddings, num_tokens = None, 0
        num_blocks = self._kv.num_blocks_for(num_tokens)
        if num_blocks > num_spare_blocks:
            return None
        key = want.answer_key
        self._sending.add(key)
        block_ids = tuple(self._kv.pins.pin_free(key, num_blocks))
        self._answers.append(FetchAnswer(want, block_ids, num_tokens))
        if embeddings is None:
            self.stats.num_not_sent += 1
        else:
            self.stats.num_sent += 1
            self._staged.append(StagedBytes(key, block_ids, embeddings.data))
        return num_blocks

    def _fail(self, fetch: EmbeddingFetch, reason: str) -> None:
        self.stats.num_failed += 1
        fetch.on_over(Fetched(None, reason))

    def _num_spare_blocks(self, queues: Queues, blocked: RequestQueue) -> int:
        pool = self._kv.block_pool
        firsts = [queue.peek_request() for queue in (queues.waiting, blocked) if queue]
        num_wanted = max((self._kv.num_blocks_for(first.num_tokens + 1) for first in firsts), default=0)
        num_free = pool.num_free_blocks - queues.running.num_blocks_due(_NUM_STEPS) - num_wanted
        return max(0, min(num_free, self._max_num_blocks - self.num_blocks()))

    @property
    def _max_num_blocks(self) -> int:
        return int(self._kv.block_pool.num_blocks * _MAX_STAGED)

    def _num_tokens_for(self, num_bytes: int) -> int:
        assert self._staging is not None
        return -(-num_bytes // self._staging.slot_size_bytes)

    def _num_blocks_for(self, fetch: EmbeddingFetch) -> int:
        return self._kv.num_blocks_for(self._num_tokens_for(fetch.num_bytes))
