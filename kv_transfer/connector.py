"""KVConnector: all that an engine sees of this floor.

The scheduler side decides with the scheduler, in its thread; the worker side moves bytes on threads of its own. They
talk through values only: KVConnectorMetadata goes down inside the scheduler's output, KVConnectorOutput comes back up
inside the model runner's. So one scheduler can drive several tensor-parallel ranks, each with its own worker side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Protocol, TypeAlias

from msgspec import Meta

from kv_transfer.params import EngineAddress, KVTransferParams
from kv_transfer.ranges import (
    MAX_ITEMS,
    BlockIds,
    Bulk,
    Count,
    LongText,
    PositiveCount,
    RequestIds,
    ShortBytes,
    TokenId,
    WireName,
)
from kv_transfer.stats import TransferStats, TransferTimings
from kv_transfer.stores.messages import LoadedBlocks, StoreMetadata, StoreStats

BlockHashes: TypeAlias = Annotated[tuple[ShortBytes, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Consumer, scheduler -> worker: these blocks wait for a producer's KV; tell it READY.

    block_ids: every block of the prompt in order, those that hit the local prefix cache included
    num_local_blocks: the first so many of them are already here and must not be sent
    block_hashes: not a handoff, but a fetch of these very blocks, or as many of them, from the first one on, as the
        peer has in its prefix cache; or of staged bytes that a single one names (staging.py)
    """

    request_id: WireName
    params: KVTransferParams
    block_ids: BlockIds
    num_local_blocks: Count
    num_prompt_tokens: Count
    block_hashes: BlockHashes = ()


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """Producer, worker -> scheduler: another engine fetches these blocks, or as many of them as are cached here.

    The answer is a producer of this ticket, without a request, that has computed what is found and ends at once.
    num_ranks: so many ranks of this engine hear of it, each from those of its peers that want something of it
    """

    transfer_id: WireName
    attempt: Count
    peer: EngineAddress
    block_hashes: BlockHashes
    num_ranks: PositiveCount = 1


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """Producer, scheduler -> worker: how far this request's KV is before and after this step's forward.

    block_ids: every block that the request holds, in order
    """

    request_id: WireName
    block_ids: BlockIds
    num_computed_tokens_before: Count
    num_computed_tokens_after: Count


@dataclass(frozen=True, slots=True)
class StagedBytes:
    """Producer, scheduler -> worker: put these bytes into these blocks before the step's transfers begin.

    name: of the producer that sends them; the blocks are zeroed with its finished_sending
    """

    name: WireName
    block_ids: BlockIds
    data: Bulk


class ProducerEnd(StrEnum):
    """How a producer's request ended."""

    HANDED_OVER = "handed_over"
    """Prefill is done and token 0 sampled; the consumer goes on."""
    FINISHED_HERE = "finished_here"
    """Token 0 ended the request (EOS, a stop token, max_tokens=1): the consumer lets go."""
    PREFIX_SENT = "prefix_sent"
    """A fetch: what is cached here of the prefix is sent, which may be less than was wanted."""
    ABORTED = "aborted"
    """The request was aborted or failed here; the consumer is told."""


@dataclass(frozen=True, slots=True)
class ProducerFinish:
    """Producer, scheduler -> worker: the request has ended here; its blocks stay until finished_sending.

    first_token_id is set iff end is HANDED_OVER.
    """

    request_id: WireName
    end: ProducerEnd
    first_token_id: TokenId | None = None


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """What one step of the scheduler asks of the worker side."""

    new_producers: Annotated[tuple[tuple[WireName, KVTransferParams, Count], ...], Meta(max_length=MAX_ITEMS)] = ()
    """(request_id, ticket, num_prompt_tokens) of requests that this engine will produce for; expect their READY."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_ITEMS)] = ()
    progress: Annotated[tuple[ProducerProgress, ...], Meta(max_length=MAX_ITEMS)] = ()
    producer_finishes: Annotated[tuple[ProducerFinish, ...], Meta(max_length=MAX_ITEMS)] = ()
    consumer_cancels: Annotated[tuple[WireName, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Consumer requests that ended (abort, deadline) while their blocks may still be written: drain, then report."""
    stores: StoreMetadata | None = None
    staged: Annotated[tuple[StagedBytes, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Of producers that begin with this step."""

    def is_empty(self) -> bool:
        """Whether the worker side has nothing to do."""
        has_handoffs = self.new_producers or self.reservations or self.progress
        has_ends = self.producer_finishes or self.consumer_cancels
        return not (has_handoffs or has_ends or self.stores)


class LoadOutcome(StrEnum):
    """How a consumer's load ended. After any of them nothing writes the request's blocks any more."""

    LOADED = "loaded"
    RELEASED = "released"
    """The producer finished the request itself: nothing is left to do here."""
    CANCELLED = "cancelled"
    """The drain after a consumer_cancel is over."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """The one and only report on a consumer's load.

    num_valid_tokens: so many tokens from the start have their KV in place (all of the prompt if LOADED)
    first_token_id:   token 0, set iff LOADED
    """

    outcome: LoadOutcome
    num_valid_tokens: Count = 0
    first_token_id: TokenId | None = None
    reason: LongText = ""
    timings: TransferTimings | None = None


@dataclass(slots=True)
class KVConnectorOutput:
    """What happened on the worker side since the last call, by request id. Late and duplicate entries are harmless."""

    ready_to_prefill: RequestIds = field(default_factory=set)
    """Producer requests whose consumer has reserved its blocks."""
    finished_sending: RequestIds = field(default_factory=set)
    """Finished producer requests whose blocks nobody reads any more: free them."""
    failed_sending: Annotated[dict[WireName, LongText], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """Producer requests, with the reason, whose consumer is gone or has let go: give them up. finished_sending follows
    once they have been finished."""
    finished_recving: Annotated[dict[WireName, ReceivedKV], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    doomed_loads: RequestIds = field(default_factory=set)
    """Loads of which one rank's part, or one link's, has failed while others wait: they have to be cancelled."""
    finished_loading: Annotated[dict[WireName, LoadedBlocks], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """Loads from stores that are over."""
    wanted_prefixes: Annotated[list[WantedPrefix], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    received_bytes: Annotated[dict[WireName, Bulk], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """What fetches of staged bytes have brought, whole slots of it; each is in finished_recving as well."""
    stats: TransferStats | None = None
    store_stats: StoreStats | None = None

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        has_received = self.finished_recving or self.finished_loading or self.wanted_prefixes
        has_failed = self.failed_sending or self.doomed_loads
        return not (self.ready_to_prefill or self.finished_sending or has_failed or has_received)

    def merge(self, later: KVConnectorOutput) -> None:
        """Add what happened afterwards; its stats take the place of these."""
        self.ready_to_prefill |= later.ready_to_prefill
        self.finished_sending |= later.finished_sending
        self.failed_sending |= later.failed_sending
        self.finished_recving |= later.finished_recving
        self.doomed_loads |= later.doomed_loads
        self.finished_loading |= later.finished_loading
        self.wanted_prefixes += later.wanted_prefixes
        self.received_bytes |= later.received_bytes
        self.stats = later.stats or self.stats
        self.store_stats = later.store_stats or self.store_stats


class KVConnectorScheduler(Protocol):
    """The scheduler's side: bookkeeping only, never blocks, no I/O. All calls come from the engine thread."""

    def on_new_request(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int) -> None:
        """Take note of a request with a ticket; called from add_request."""

    def get_num_new_matched_tokens(self, request_id: str, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit come from outside, and whether they come asynchronously.

        A consumer answers (num_prompt_tokens - num_local_tokens, True), also when that is 0: token 0 still comes from
        the producer. A producer answers (None, False), "ask again", until READY is in, and then (0, False).
        (None, False) is also a consumer's answer while max_reserved_requests are in transfer.
        Requests without a ticket get (0, False).
        """

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_local_tokens: int) -> None:
        """The consumer's blocks are allocated: the next metadata carries the reservation."""

    def build_connector_meta(self, progress: Sequence[ProducerProgress]) -> KVConnectorMetadata:
        """Collect what this step asks of the worker side; resets what was collected."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take in what the worker side reported (READY received, loads and sends over)."""

    def request_finished(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> bool:
        """The request has ended in the scheduler, for whatever reason; called exactly once for each request.

        Returns True if its blocks may still be read or written: then the scheduler keeps them until finished_sending
        (producer) or finished_recving (consumer) names the request.
        For a consumer, end is ABORTED if the load is not over; it is ignored once the load is.
        """

    def cancel_load(self, request_id: str) -> None:
        """End a consumer's load that took too long, while the request lives on and keeps its blocks.

        The next metadata carries it in consumer_cancels; finished_recving follows as after an abort (CANCELLED, with
        num_valid_tokens, or whatever outcome was quicker). request_finished still comes, once, when the request ends.
        """

    def has_pending(self) -> bool:
        """Whether the next metadata would not be empty, so that a step is due although no token is."""


class KVConnectorWorker(Protocol):
    """The worker's side. Calls come from the engine thread and return at once; I/O runs on other threads."""

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Before the forward: reservations, cancels, finishes, and blocks that the prefix cache already holds."""

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """After the forward: the blocks that it completed may leave."""

    def take_output(self) -> KVConnectorOutput:
        """What happened since the last call."""

    def shutdown(self) -> None:
        """Close every link, stop every thread, release every file descriptor; within a few seconds."""
