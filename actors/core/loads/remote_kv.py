"""The scheduler's part in transfers of KV and embeddings, and why no engines ever wait for each other in a circle.

A *producer* is a request that this engine prefills for another engine; a *consumer* is a request whose prompt another
engine prefills for this one. A *load* brings KV into blocks of this engine: a consumer's whole prompt from its
producer, or a part of a request's prefix from host memory, another store, or another engine's cache.

Beside the scheduler's own queues there are:
- blocked_producers: requests whose consumer has not sent READY yet; they hold no blocks
- blocked_consumers: requests that wait because too many loads are under way; they hold no blocks
- loading:           requests in WAITING_FOR_REMOTE_KVS; a link or a store may write their blocks
- held:              finished requests; a link or a store may still read or write their blocks
- answers:           cached blocks (without a request) that are being sent to an engine that fetches them
- embeddings:        blocks (without a request) that hold embeddings of images while these are sent or received
                     (embedding_transfers.py)

A block is *pinned* if preemption cannot free it: the blocks of loading, held, answers and embeddings, and those of
running producers. Each pinned block becomes free again without needing a further block of this engine:
- A running producer has had blocks for its whole prompt from the start; it needs only computation.
- The blocks of a held producer are sent into blocks that its consumer reserved before it sent READY.
- The blocks of a load are reserved, and its producer may write them. A load past its deadline is cancelled, and its
  blocks are free when its link has drained.
- A load of a prefix waits for no other blocks, and has a deadline too.
- Answers and sent embeddings go into blocks that the fetching engine has reserved.
- Fetched embeddings wait for no request, and have a deadline.
So an engine that waits for blocks waits only for work that ends without it. Requests are admitted in order: none passes
a request at the head of the queue that waits for blocks, so that request gets the blocks that become free. And with no
block pinned and no request running, every request that was not refused fits.

There is one exception to the order: other requests may pass a load for which there is no room beside the running
requests (load_room.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.arriving_prefixes import ArrivingPrefixes
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
"""About how many steps it takes to send a prefix to another engine."""


class RemoteKV:
    """The scheduler's part in transfers. RemoteKV moves requests between queues; only the scheduler ends requests."""

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
        """vocab_size: a first token from a producer has to be below it; num_lookahead_tokens: see SchedulerConfig"""
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
        self.arriving = ArrivingPrefixes(
            self.loading,
            self._num_blocks_after_load,
            kv_cache_manager.block_size,
            (lambda _: None) if transfers.prefix_sources is None else transfers.prefix_sources.compute_s,
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

    def waits(self) -> dict[str, int]:
        """Return how many requests wait for a decode engine's reservation, for room for their load, or for a prefix."""
        return {
            "reservation": len(self.blocked_producers),
            "load": len(self.blocked_consumers),
            "prefix": self.arriving.num_waiting,
        }

    def _num_other_pinned_blocks(self) -> int:
        return self.prefix_loads.num_answered_blocks() + self.embeddings.num_blocks()

    @property
    def has_transfers(self) -> bool:
        """Whether a link may use blocks that belong to no unfinished request."""
        return bool(self.held or self.prefix_loads.answers or self.embeddings)

    def add_request(self, request: Request) -> None:
        """Tell the KV connector about a new request that has a ticket."""
        if self.connector is not None and request.kv_transfer_params is not None:
            params = replace(request.kv_transfer_params, content_hash=request.content_hash())
            self.connector.on_new_request(request.request_id, params, request.num_tokens)

    def build_metadata(
        self, progress: Sequence[ProducerProgress], num_tokens: int, now_s: float
    ) -> KVConnectorMetadata | None:
        """Return what the connector's worker side does in a step of num_tokens tokens; None without a connector."""
        if self.connector is None:
            return None
        metadata = self.connector.build_connector_meta(progress)
        return self.embeddings.add_to(self.prefix_loads.begin_step(metadata, num_tokens, now_s))

    def may_prefill(self, request: Request, num_local_tokens: int) -> bool:
        """Whether the request may be computed now. A producer may once its consumer has sent READY, others always."""
        if self.connector is None or request.transfer_role is not TransferRole.PRODUCER:
            return True
        num_tokens = self.connector.get_num_new_matched_tokens(request.request_id, num_local_tokens)
        return num_tokens is not None

    def start_load(self, request: Request, queues: Queues, num_headroom_blocks: int, now_s: float) -> LoadDecision:
        """Reserve blocks for a consumer's prompt and for its first token's own KV, and ask for the KV."""
        return self._handoff_loads.start(request, queues, num_headroom_blocks, now_s)

    def start_prefix_load(
        self, request: Request, hit: list[KVCacheBlock], queues: Queues, num_headroom_blocks: int, now_s: float
    ) -> bool:
        """Load blocks of a request's prefix that this engine does not have. Returns whether a load has begun.

        hit: the blocks of the prefix that this engine has
        """
        return self.prefix_loads.try_start(request, hit, queues, num_headroom_blocks, now_s)

    def _num_blocks_after_load(self, request: Request) -> int:
        """Return how many whole blocks a loading request will have whose hashes are those of its first tokens."""
        if self._kv.states:
            return 0  # Of a prefix on its way only the state at its end is kept, which others need not share.
        known = self.prefix_loads.num_blocks_after(request.request_id)
        return request.num_tokens // self._kv.block_size if known is None else known

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
        """Cancel overdue loads, and begin transfers of embeddings for which there is room. Called before each step."""
        self._cancel_overdue_loads(now_s)
        self.embeddings.proceed(queues, self.blocked_consumers, now_s)

    def _cancel_overdue_loads(self, now_s: float) -> None:
        """Cancel the loads whose deadline has passed. The failure policy decides what follows once they drained."""
        for request_id in self._loading.pop_overdue(now_s):
            self._cancel_load(request_id)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a load, of embeddings, or of a wait for a prefix, by the engine's clock."""
        deadlines = (self._loading.next_deadline(), self.embeddings.next_deadline(), self.arriving.next_deadline())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def update(
        self, output: reports.KVConnectorOutput, requests: Mapping[str, Request], queues: Queues, now_s: float
    ) -> list[Ending]:
        """Process the reports of the connector's worker side, and return the requests that have to end."""
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
                    self._finish_prefix_load(request_id, loaded, queues, now_s, is_fetched=False)
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
            self._finish_prefix_load(key.name, loaded, queues, now_s, is_fetched=True)
        elif key.kind is TransferKind.BYTES_FETCH:
            self.num_late_completions += not self.embeddings.on_received(report)
        elif (consumer := self._loading.pop(key.name)) is not None:
            return self._handoff_loads.finish(consumer, received, queues, now_s)
        else:
            self._free_held(key.name, TransferRole.CONSUMER)
        return []

    def _finish_prefix_load(
        self, request_id: str, loaded: LoadedBlocks, queues: Queues, now_s: float, *, is_fetched: bool
    ) -> None:
        if not self.prefix_loads.finish(request_id, loaded, queues, now_s, is_fetched=is_fetched):
            self._free_held(request_id, TransferRole.CONSUMER)

    def _on_want(self, want: WantedFetch, queues: Queues, now_s: float) -> None:
        match want.fetch:
            case PrefixFetch():
                self.prefix_loads.answer(want, want.fetch, queues.running.num_blocks_due(_ANSWER_STEPS))
            case BytesFetch(name=mm_hash):
                self.embeddings.on_want(want, mm_hash, now_s)

    def _end_producer(self, key: TransferKey, reason: str, requests: Mapping[str, Request]) -> list[Ending]:
        if key.kind is not TransferKind.HANDOFF:
            # The answer to a fetch has no request, and ends with its FinishedSending.
            is_late = key not in self.prefix_loads.answers and not self.embeddings.is_sending(key)
            self.num_late_completions += is_late
            return []
        request = requests.get(key.name)
        if request is not None and request.transfer_role is TransferRole.PRODUCER:
            return [Ending(request, RequestStatus.FINISHED_ERROR, f"handoff failed: {reason}")]
        # A producer's request in `held` has ended; its blocks are kept until FinishedSending.
        self.num_late_completions += key.name not in self.held
        return []

    def _free_held(self, request_id: str, role: TransferRole) -> None:
        """Free a finished request's blocks. A late, duplicate or unknown completion is counted and dropped."""
        held_for = self._held_for.get(request_id, set())
        if role not in held_for:
            self.num_late_completions += 1
            return
        held_for.remove(role)
        if not held_for:
            del self._held_for[request_id]
            self._kv.free(self.held.pop(request_id))
