"""Prefixes from other engines' caches: the scheduler's side, at both ends of a fetch.

To the links a fetch is a transfer like a handoff. The consumer names block hashes in its READY. The producer sends
those of the blocks that its prefix cache has, from the first one on, and ends with PREFIX_SENT. The producer has no
request for a fetch: the blocks are pinned until they have left or the link is dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.connector.fetches import PrefixFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.params import KVTransferParams, PrefixSource, TransferRole
from kv_transfer.prefix.fetch_cost import FetchCost


@dataclass(frozen=True, slots=True)
class FetchAnswer:
    """The answer to another engine's fetch: the KV, or the bytes, of num_tokens slots in these blocks; perhaps none."""

    want: WantedFetch
    block_ids: tuple[int, ...]
    num_tokens: int


def add_fetches(
    metadata: KVConnectorMetadata,
    reservations: Sequence[Reservation],
    cancels: Sequence[TransferKey],
    answers: Sequence[FetchAnswer],
) -> KVConnectorMetadata:
    """Return the metadata with fetches that begin or are cancelled, and with the answers to other engines' fetches."""
    producers, progress, finishes = [], [], []
    for answer in answers:
        want, key, num_tokens = answer.want, answer.want.answer_key, answer.num_tokens
        ticket = KVTransferParams(want.fetch.fetch_id, want.attempt, TransferRole.PRODUCER, want.peer)
        producers.append((key, ticket, num_tokens))
        progress.append(ProducerProgress(key, answer.block_ids, num_tokens, num_tokens))
        finishes.append(ProducerFinish(key, ProducerEnd.PREFIX_SENT))
    return replace(
        metadata,
        new_producers=(*metadata.new_producers, *producers),
        reservations=(*metadata.reservations, *reservations),
        progress=(*metadata.progress, *progress),
        producer_finishes=(*metadata.producer_finishes, *finishes),
        consumer_cancels=(*metadata.consumer_cancels, *cancels),
    )


@dataclass(slots=True)
class _Fetch:
    source: PrefixSource
    block_hashes: tuple[bytes, ...]
    started_s: float = 0.0


class PrefixFetches:
    """This engine's fetches, by request id, and its answers to other engines' fetches.

    The object belongs to the engine thread. Invariant: a fetch is here from reserve() to end(), whether start() was
    called or not; at most max_fetches are here.
    """

    def __init__(
        self,
        identity: str,
        block_size: int,
        *,
        max_fetches: int,
        cost: FetchCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """identity: makes the ids of this engine's fetches unique in the cluster; clock: monotonic, in seconds

        max_fetches: the most fetches under way at once; 0: this engine fetches nothing, but answers others
        """
        self._identity = identity
        self._block_size = block_size
        self._max_fetches = max_fetches
        self._cost = cost or FetchCost()
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._num_started = 0
        self._reservations: list[Reservation] = []
        self._cancels: list[TransferKey] = []
        self._answers: list[FetchAnswer] = []

    def reserve(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        source: PrefixSource,
        num_local_blocks: int,
        num_stored_blocks: int,
    ) -> int:
        """Reserve a fetch, and return how many of these blocks it will ask for; 0 if no fetch is worth it.

        block_hashes:      of the request's blocks after the first num_local_blocks
        num_stored_blocks: how many of these blocks, from the first one on, a store can bring
        """
        num_blocks = min(len(block_hashes), source.num_tokens // self._block_size - num_local_blocks)
        num_spared_tokens = (num_blocks - num_stored_blocks) * self._block_size
        if len(self._fetches) >= self._max_fetches or not self._cost.is_worth_it(num_blocks, num_spared_tokens):
            return 0
        self._fetches[request_id] = _Fetch(source, tuple(block_hashes[:num_blocks]))
        return num_blocks

    def reserve_whole(
        self, request_id: str, block_names: Sequence[bytes], source: PrefixSource, num_spared_tokens: int
    ) -> bool:
        """Reserve a fetch of blocks that are of use together only; return False if no such fetch is worth it.

        block_names:       hashes of blocks of tokens, then the names of the blocks of a snapshot
        num_spared_tokens: how many tokens need not be computed if all of these blocks come
        """
        is_worth_it = self._cost.is_worth_it(len(block_names), num_spared_tokens)
        if len(self._fetches) >= self._max_fetches or not is_worth_it:
            return False
        self._fetches[request_id] = _Fetch(source, tuple(block_names))
        return True

    def start(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Begin the request's fetch, into these blocks; return False if it has reserved none."""
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return False
        fetch.started_s = self._clock()
        self._num_started += 1
        transfer_id = f"fetch-{self._identity}-{self._num_started}"
        params = KVTransferParams(transfer_id, 0, TransferRole.CONSUMER, fetch.source.peer)
        num_tokens = len(block_ids) * self._block_size
        wanted = PrefixFetch(transfer_id, fetch.block_hashes)
        self._reservations.append(Reservation(_key(request_id), params, tuple(block_ids), 0, num_tokens, wanted))
        return True

    def cancel(self, request_id: str) -> bool:
        """Cancel the request's fetch, whose report still comes; return False if it has reserved none."""
        if request_id not in self._fetches:
            return False
        self._cancels.append(_key(request_id))
        return True

    def end(self, request_id: str, num_blocks: int) -> bool:
        """End the request's fetch, which has brought so many blocks; return False if it had reserved none.

        num_blocks: 0 if the fetch was not started
        """
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None and num_blocks:
            self._cost.observe_fetch(num_blocks, self._clock() - fetch.started_s)
        return fetch is not None

    def answer(self, want: WantedFetch, block_ids: Sequence[int]) -> None:
        """Send these blocks, perhaps none, to the engine that fetches them."""
        self._answers.append(FetchAnswer(want, tuple(block_ids), len(block_ids) * self._block_size))

    def observe_steps(self, num_tokens: int, seconds: Sequence[float]) -> None:
        """Note how long steps took that computed so many tokens each, the oldest first."""
        self._cost.observe_steps(num_tokens, seconds)

    def compute_s(self, num_tokens: int) -> float | None:
        """Return the seconds in which this engine computes so many tokens; None before it has observed three steps."""
        return self._cost.compute_s(num_tokens)

    @property
    def has_orders(self) -> bool:
        """Whether anything was collected since the last add_to()."""
        return bool(self._reservations or self._cancels or self._answers)

    def add_to(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata:
        """Return the metadata with everything that was collected since the last call."""
        if not self.has_orders:
            return metadata
        metadata = add_fetches(metadata, self._reservations, self._cancels, self._answers)
        self._reservations, self._cancels, self._answers = [], [], []
        return metadata


def _key(request_id: str) -> TransferKey:
    return TransferKey(TransferKind.PREFIX_FETCH, request_id)
