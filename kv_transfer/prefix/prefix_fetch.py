"""Prefixes from other engines' caches, the scheduler's side of both ends.

To the links a fetch is a transfer like a handoff's: its consumer names block hashes with its READY, its producer sends
what its prefix cache has of them, from the first one on, and says PREFIX_SENT. The producer has no request for it: the
blocks are pinned until they have left or the link is dead.
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
    """What is sent to an engine that wants it: so many tokens, in these blocks."""

    want: WantedFetch
    block_ids: tuple[int, ...]
    num_tokens: int


def add_fetches(
    metadata: KVConnectorMetadata,
    reservations: Sequence[Reservation],
    cancels: Sequence[TransferKey],
    answers: Sequence[FetchAnswer],
) -> KVConnectorMetadata:
    """The metadata with fetches that begin or are cancelled, and with what is sent for others' fetches."""
    producers, progress, finishes = [], [], []
    for answer in answers:
        want, key, num_tokens = answer.want, answer.want.answer_key, answer.num_tokens
        ticket = KVTransferParams(want.transfer_id, want.attempt, TransferRole.PRODUCER, want.peer)
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
    """Belongs to the engine thread. identity: names this engine's fetches; clock: monotonic, in seconds."""

    def __init__(
        self,
        identity: str,
        block_size: int,
        *,
        max_fetches: int,
        cost: FetchCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_fetches: under way at once; 0: none is made, but others get what they want."""
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
        """How many of these blocks are to be fetched, 0 if that is not worth it.

        block_hashes: the request's blocks after num_local_blocks, of which num_stored_blocks are to be had from a store
        """
        num_blocks = min(len(block_hashes), source.num_tokens // self._block_size - num_local_blocks)
        num_spared_tokens = (num_blocks - num_stored_blocks) * self._block_size
        if len(self._fetches) >= self._max_fetches or not self._cost.is_worth_it(num_blocks, num_spared_tokens):
            return 0
        self._fetches[request_id] = _Fetch(source, tuple(block_hashes[:num_blocks]))
        return num_blocks

    def start(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Fetch into these blocks; returns whether the request has reserved a fetch."""
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
        """It is not wanted any more; returns whether the request has reserved a fetch."""
        if request_id not in self._fetches:
            return False
        self._cancels.append(_key(request_id))
        return True

    def end(self, request_id: str, num_blocks: int) -> bool:
        """It has brought so many blocks, or was not started; returns whether the request had reserved a fetch."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None and num_blocks:
            self._cost.observe_fetch(num_blocks, self._clock() - fetch.started_s)
        return fetch is not None

    def answer(self, want: WantedFetch, block_ids: Sequence[int]) -> None:
        """Send another engine these blocks, perhaps none."""
        self._answers.append(FetchAnswer(want, tuple(block_ids), len(block_ids) * self._block_size))

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        self._cost.observe_step(num_tokens, seconds)

    def add_to(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata:
        """The metadata with what was collected, once."""
        if not (self._reservations or self._cancels or self._answers):
            return metadata
        metadata = add_fetches(metadata, self._reservations, self._cancels, self._answers)
        self._reservations, self._cancels, self._answers = [], [], []
        return metadata


def _key(request_id: str) -> TransferKey:
    return TransferKey(TransferKind.PREFIX_FETCH, request_id)
