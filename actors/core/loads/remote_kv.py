"""Requests whose KV comes from, or goes to, another engine, and why they never wait in a circle.

Such a request can be in one of these, beside the scheduler's own queues:
- blocked_producers: READY is not in yet; the request holds no blocks
- blocked_consumers: as many loads as are allowed are under way; the request holds no blocks
- loading:           WAITING_FOR_REMOTE_KVS; a link, or a store, may write its blocks
- held:              finished, and a link, or a store, may still read or write its blocks
- answers:           no request: cached blocks that are being sent to another engine that fetches them
- embeddings:        no request: images' embeddings, in blocks for as long as they travel (embedding_transfers.py)

A load is a consumer's, whose whole prompt its producer computes, or that of a prefix, which a request loads that goes
on here: from host memory, from another store, or from another engine's cache.

Blocks are pinned if preemption can't free them: those of loading, held, answers, embeddings, and of running producers.
Pinned blocks come back without any further block of this engine:
- a running producer holds blocks for its whole prompt from the start; all that it needs is computation
- a held producer's blocks leave into blocks that its consumer reserved before it said READY
- a load's producer was promised these very blocks; a load past its deadline is cancelled, and cancels drain
- a load of a prefix waits for nobody's blocks, and has its deadline as well
- answers, and sent embeddings, leave into blocks that the engine which fetches them has reserved
- embeddings that are fetched wait for nobody's request, and have their deadline
So the engine that waits for blocks waits only for things that end by themselves; nothing is admitted past a request at
the head that waits for blocks; and with nothing pinned and nothing running, whatever was not refused fits.

Others may pass a load for which there is no room beside what runs (load_room.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.embedding_transfers import EmbeddingTransfers
from actors.core.loads.handoff_loads import HandoffLoads, LoadDecision
from actors.core.loads.load_room import LoadRoom
from actors.core.loads.loading_requests import LoadingRequests
from actors.core.loads.prefix_loads import PrefixLoads
from actors.core.loads.transfer_parts import TransferParts
from actors.core.outputs.ending import Ending
from actors.core.queue.request_queue import RequestQueue
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from actors.core.requests.structured_output import StructuredOutputManager
from kv_transfer.connector import reports
from kv_transfer.connector.fetches import BytesFetch, PrefixFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerProgress
from kv_transfer.connector.store_steps import LoadedBlocks, StoreStats
from kv_transfer.message_ranges import MAX_COUNT
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import TransferStats

_ANSWER_STEPS: Final = 8
"""About how many steps it takes to send another engine a prefix."""


class RemoteKV:
    """The scheduler's part in handoffs. It moves requests between queues; only the scheduler finishes them."""

    def __init__(
        self,
        transfers: TransferParts,
        kv_cache_manager: KVCacheManager,
        *,
        blocked_consumers: RequestQueue,
        structured_output: StructuredOutputManager | None = None,
        vocab_size: int = MAX_COUNT,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """vocab_size: a producer's first token has to be below it; num_lookahead_tokens: see SchedulerConfig"""
        self.connector = transfers.connector
        self.blocked_producers: dict[str, Request] = {}
        self.blocked_consumers = blocked_consumers
        self.held: dict[str, Request] = {}
        self._held_for: dict[str, set[TransferRole]] = {}
        self.num_late_completions = 0
        self.transfer_stats: TransferStats | None = None
        self.store_stats: StoreStats | None = None
        self._kv = kv_cache_manager
        self._loading = LoadingRequests(kv_cache_manager)
        room = LoadRoom(kv_cache_manager, self.loading, self.held, self._num_other_pinned_blocks, num_lookahead_tokens)
        self.embeddings = EmbeddingTransfers(
            transfers.staging, kv_cache_manager, transfers.config.prefix_load_timeout_s
        )
        self.prefix_loads = PrefixLoads(
            transfers.prefix_sources,
            kv_cache_manager,
            loading=self._loading,
            room=room,
            timeout_s=transfers.config.prefix_load_timeout_s,
        )
        self._handoff_loads = HandoffLoads(
            transfers.connector,
            kv_cache_manager,
            loading=self._loading,
            room=room,
            config=transfers.config,
            structured_output=structured_output,
            vocab_size=vocab_size,
        )

    @property
    def loading(self) -> dict[str, Request]:
        """Requests whose loads are under way, by id."""
        return self._loading.by_id

    def _num_other_pinned_blocks(self) -> int:
        return self.prefix_loads.num_answered_blocks() + self.embeddings.num_blocks()

    @property
    def has_transfers(self) -> bool:
        """Whether a link may use blocks that are no unfinished request's."""
        return bool(self.held or self.prefix_loads.answers or self.embeddings)

    def add_request(self, request: Request) -> None:
        """Tell the connector of a request with a ticket."""
        if self.connector is not None and request.kv_transfer_params is not None:
            params = replace(request.kv_transfer_params, content_hash=request.content_hash())
            self.connector.on_new_request(request.request_id, params, request.num_tokens)

    def build_metadata(
        self, progress: Sequence[ProducerProgress], num_tokens: int, now_s: float
    ) -> KVConnectorMetadata | None:
        """Return what a step of num_tokens tokens asks of the worker side; None without a connector."""
        if self.connector is None:
            return None
        metadata = self.connector.build_connector_meta(progress)
        return self.embeddings.add_to(self.prefix_loads.begin_step(metadata, num_tokens, now_s))

    def may_prefill(self, request: Request, num_local_tokens: int) -> bool:
        """Whether the request may compute here now: READY is in, if it is a producer."""
        if self.connector is None or request.transfer_role is not TransferRole.PRODUCER:
            return True
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request.request_id, num_local_tokens)
        return num_tokens is not None

    def start_load(self, request: Request, queues: Queues, num_headroom_blocks: int, now_s: float) -> LoadDecision:
        """Reserve blocks for a consumer's prompt and for its first token's own KV, and ask for the KV."""
        return self._handoff_loads.start(request, queues, num_headroom_blocks, now_s)

    def start_prefix_load(
        self, request: Request, hit: list[KVCacheBlock], queues: Queues, num_headroom_blocks: int, now_s: float
    ) -> bool:
        """Load the blocks of a request's prefix beyond its hit from elsewhere; returns whether a load has begun."""
        return self.prefix_loads.try_start(request, hit, queues, num_headroom_blocks, now_s)

    def release(self, request: Request, end: ProducerEnd, first_token_id: int | None = None) -> None:
        """Remove a finished request, and free its blocks once neither a link nor a store uses them."""
        self.blocked_producers.pop(request.request_id, None)
        self.blocked_consumers.remove_request(request)
        self._loading.pop(request.request_id)
        held_for: set[TransferRole] = set()
        if request.request_id in self.prefix_loads:
            self._cancel_load(request.request_id)
            held_for.add(TransferRole.CONSUMER)
        ticket = request.kv_transfer_params
        if (
            self.connector is not None
            and ticket is not None
            and self.connector.request_finished(request.request_id, end, first_token_id)
        ):
            held_for.add(ticket.role)
        if held_for:
            self.held[request.request_id] = request
            self._held_for[request.request_id] = held_for
        else:
            self._kv.free(request)

    def _cancel_load(self, request_id: str) -> None:
        if request_id in self.prefix_loads:
            self.prefix_loads.cancel(request_id)
        else:
            assert self.connector is not None, "no handoff without a connector"
            self.connector.cancel_load(request_id)

    def proceed(self, queues: Queues, now_s: float) -> None:
        """Cancel overdue loads, and move embeddings for which there is room. Called before each step."""
        self._cancel_overdue_loads(now_s)
        self.embeddings.proceed(queues, self.blocked_consumers, now_s)

    def _cancel_overdue_loads(self, now_s: float) -> None:
        """Cancel the loads whose deadline has passed; the failure policy applies when they have drained."""
        for request_id in self._loading.pop_overdue(now_s):
            self._cancel_load(request_id)

    def next_deadline(self) -> float | None:
        """Return the engine's clock at the earliest deadline of a load, or of embeddings, in seconds."""
        deadlines = (self._loading.next_deadline(), self.embeddings.next_deadline())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def update(
        self, output: reports.KVConnectorOutput, requests: Mapping[str, Request], queues: Queues, now_s: float
    ) -> list[Ending]:
        """Take in what the connector's worker side reports, and return the ends of requests that follow."""
        assert self.connector is not None, "only a connector has an output"
        self.prefix_loads.end_step(now_s)
        self.connector.update_connector_output(output)
        self.transfer_stats = output.stats or self.transfer_stats
        self.store_stats = output.store_stats or self.store_stats
        endings: list[Ending] = []
        for report in output.reports:
            match report:
                case reports.ReadyToPrefill(TransferKey(TransferKind.HANDOFF, request_id)):
                    if (producer := self.blocked_producers.pop(request_id, None)) is not None:
                        queues.waiting.restore_request(producer)
                case reports.FailedSending(key, reason):
                    endings += self._end_producer(key, reason, requests)
                case reports.FinishedSending(key):
                    self._on_sent(key)
                case reports.FinishedReceiving():
                    endings += self._on_received(report, queues, now_s)
                case reports.PartFailed(TransferKey(TransferKind.HANDOFF | TransferKind.PREFIX_FETCH, request_id)):
                    if request_id in self.loading:
                        self._cancel_load(request_id)
                case reports.FinishedLoading(request_id, loaded):
                    self._finish_prefix_load(request_id, loaded, queues, now_s)
                case reports.FetchWanted(want):
                    self._on_want(want, queues, now_s)
        return endings

    def _on_sent(self, key: TransferKey) -> None:
        match key.kind:
            case TransferKind.PREFIX_ANSWER:
                self.num_late_completions += not self.prefix_loads.on_sent(key)
            case TransferKind.BYTES_ANSWER:
                self.num_late_completions += not self.embeddings.on_sent(key)
            case _:
                self._free_held(key.name, TransferRole.PRODUCER)

    def _on_received(self, report: reports.FinishedReceiving, queues: Queues, now_s: float) -> list[Ending]:
        key, received = report.key, report.received
        if key.kind is TransferKind.PREFIX_FETCH:
            loaded = LoadedBlocks(received.num_valid_tokens // self._kv.block_size, received.reason)
            self._finish_prefix_load(key.name, loaded, queues, now_s)
        elif key.kind is TransferKind.BYTES_FETCH:
            self.num_late_completions += not self.embeddings.on_received(report)
        elif (consumer := self._loading.pop(key.name)) is not None:
            return self._handoff_loads.finish(consumer, received, queues, now_s)
        else:
            self._free_held(key.name, TransferRole.CONSUMER)
        return []

    def _finish_prefix_load(self, request_id: str, loaded: LoadedBlocks, queues: Queues, now_s: float) -> None:
        if not self.prefix_loads.finish(request_id, loaded, queues, now_s):
            self._free_held(request_id, TransferRole.CONSUMER)

    def _on_want(self, want: WantedFetch, queues: Queues, now_s: float) -> None:
        match want.fetch:
            case PrefixFetch():
                self.prefix_loads.answer(want, want.fetch, queues.running.num_blocks_due(_ANSWER_STEPS))
            case BytesFetch(name=mm_hash):
                self.embeddings.on_want(want, mm_hash, now_s)

    def _end_producer(self, key: TransferKey, reason: str, requests: Mapping[str, Request]) -> list[Ending]:
        if key.kind is not TransferKind.HANDOFF:
            # What answers a fetch has no request, and is over with its FinishedSending.
            is_late = key not in self.prefix_loads.answers and not self.embeddings.is_sending(key)
            self.num_late_completions += is_late
            return []
        request = requests.get(key.name)
        if request is not None and request.transfer_role is TransferRole.PRODUCER:
            return [Ending(request, RequestStatus.FINISHED_ERROR, f"handoff failed: {reason}")]
        # A held one has been finished already and waits for FinishedSending.
        self.num_late_completions += key.name not in self.held
        return []

    def _free_held(self, request_id: str, role: TransferRole) -> None:
        """Free a finished request's blocks; a late, duplicate or unknown completion is counted and dropped."""
        held_for = self._held_for.get(request_id, set())
        if role not in held_for:
            self.num_late_completions += 1
            return
        held_for.remove(role)
        if not held_for:
            del self._held_for[request_id]
            self._kv.free(self.held.pop(request_id))
