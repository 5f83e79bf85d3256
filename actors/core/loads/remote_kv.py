"""Requests whose KV comes from, or goes to, another engine, and why they never wait in a circle.

Places of such a request, beside the scheduler's own queues:
- blocked_producers: READY is not in yet; it holds nothing
- blocked_consumers: as many loads as are allowed are under way; it holds nothing
- loading:           WAITING_FOR_REMOTE_KVS; a link, or a store, may write its blocks
- held:              finished, and a link, or a store, may still read or write its blocks
- lent:              no request: cached blocks that are being sent to another engine that asked for them
- embeddings:        no request: images' embeddings, in blocks for as long as they travel (embedding_transfers.py)

A load is a consumer's, whose whole prompt its producer computes, or that of a prefix, which a request loads that goes
on here: from host memory, from another store, or from another engine's cache.

Blocks are pinned if preemption can't free them: those of loading, held, lent, embeddings, and of running producers.
Pinned blocks come back without any further block of this engine:
- a running producer holds blocks for its whole prompt from the start; all that it needs is computation
- a held producer's blocks leave into blocks that its consumer reserved before it said READY
- a load's producer was promised these very blocks; a load past its deadline is cancelled, and cancels drain
- a load of a prefix waits for nobody's blocks, and has its deadline as well
- lent blocks, and sent embeddings, leave into blocks that their borrower has reserved
- embeddings that are fetched wait for nobody's request, and have their deadline
So the engine that waits for blocks waits only for things that end by themselves; nothing is admitted past a request at
the head that waits for blocks; and with nothing pinned and nothing running, whatever passed the door fits.

A load is granted only if every admitted request could still have its tokens, and some more, beside all pinned blocks
(_leaves_room): transfers do not squeeze out the work that they are for. Others may pass a load that this rule refuses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.embedding_transfers import EmbeddingTransfers, Staging
from actors.core.loads.prefix_loads import PrefixLoads
from actors.core.queue.places import Places
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.queue.request_queue import RequestQueue
from actors.core.requests.request import Request
from actors.core.requests.status import RequestStatus
from actors.core.requests.stop import find_stop
from actors.core.requests.structured_output import StructuredOutputManager, find_objection
from actors.core.step import Step
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.interface import KVConnectorScheduler
from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.params import TransferRole
from kv_transfer.prefix.prefix_fetch import is_fetch, request_of
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.ranges import MAX_COUNT
from kv_transfer.transfer_stats import TransferStats

_LOAN_STEPS: Final = 8
"""About how long a loan takes."""
_MAX_GROWTH_TOKENS: Final = 256
_MAX_GROWTH: Final = 8
"""What a request may grow by while a load is under way: so many tokens, but no more than a pool's eighth."""


class LoadDecision(enum.Enum):
    """What became of a consumer at the head of the waiting requests."""

    STARTED = enum.auto()
    LIMIT_REACHED = enum.auto()
    """No further load is granted now: others may pass."""
    WOULD_SQUEEZE = enum.auto()
    """The blocks are free, but those that are admitted will need them: others may pass, within bounds."""
    NO_ROOM = enum.auto()
    """The blocks are missing: nobody may pass."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that has to end. is_silent: its client hears of it from elsewhere."""

    request: Request
    status: RequestStatus
    error: str | None = None
    is_silent: bool = False


class RemoteKV:
    """The scheduler's part in handoffs. It moves requests between places; only the scheduler finishes them."""

    def __init__(
        self,
        connector: KVConnectorScheduler | None,
        kv_cache_manager: KVCacheManager,
        *,
        blocked_consumers: RequestQueue,
        config: KVTransferConfig,
        prefix_sources: PrefixSources | None = None,
        structured_output: StructuredOutputManager | None = None,
        staging: Staging | None = None,
        vocab_size: int = MAX_COUNT,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """vocab_size: a producer's first token has to be below it; num_lookahead_tokens: see SchedulerConfig"""
        self._vocab_size = vocab_size
        self._num_lookahead_tokens = num_lookahead_tokens
        self.connector = connector
        self.embeddings = EmbeddingTransfers(staging, kv_cache_manager, config.prefix_load_timeout_s)
        self.prefix_loads = PrefixLoads(prefix_sources, kv_cache_manager)
        self._held_for: dict[str, set[TransferRole]] = {}
        self._structured_output = structured_output
        self.blocked_producers: dict[str, Request] = {}
        self.blocked_consumers = blocked_consumers
        self.loading: dict[str, Request] = {}
        self.held: dict[str, Request] = {}
        self.num_late_completions = 0
        self.transfer_stats: TransferStats | None = None
        self.store_stats: StoreStats | None = None
        self._kv = kv_cache_manager
        self._config = config
        num_slots = kv_cache_manager.block_pool.num_blocks * kv_cache_manager.block_size
        self._num_growth_tokens = min(_MAX_GROWTH_TOKENS, num_slots // _MAX_GROWTH)
        self._load_deadlines: RemovableHeap[tuple[float]] = RemovableHeap()

    @property
    def num_blocked(self) -> int:
        """Requests that wait for a peer and hold nothing."""
        return len(self.blocked_producers) + len(self.blocked_consumers)

    @property
    def has_transfers(self) -> bool:
        """Whether a link may use blocks that are no unfinished request's."""
        return bool(self.held or self.prefix_loads.lent or self.embeddings)

    def add_request(self, request: Request) -> None:
        """Tell the connector of a request with a ticket."""
        if self.connector is not None and request.kv_transfer_params is not None:
            params = replace(request.kv_transfer_params, content_hash=request.content_hash())
            self.connector.on_new_request(request.request_id, params, request.num_tokens)

    def build_metadata(self, step: Step, num_tokens: int) -> KVConnectorMetadata | None:
        """What this step, which computes so many tokens, asks of the worker side; None without a connector."""
        if self.connector is None:
            return None
        metadata = self.connector.build_connector_meta(step.producer_progress)
        return self.embeddings.add_to(self.prefix_loads.begin_step(metadata, num_tokens, step.now_s))

    def may_prefill(self, request: Request, num_local_tokens: int) -> bool:
        """Whether the request may compute here now: READY is in, if it is a producer."""
        if self.connector is None or request.transfer_role is not TransferRole.PRODUCER:
            return True
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request.request_id, num_local_tokens)
        return num_tokens is not None

    def start_load(self, request: Request, places: Places, num_headroom_blocks: int, now_s: float) -> LoadDecision:
        """Reserve blocks for a consumer's prompt and for its first token's own KV, and ask for the KV."""
        assert self.connector is not None, "a ticket without a connector is refused at the door"
        hit = self._kv.get_computed_blocks(request)
        num_local_tokens = len(hit) * self._kv.block_size
        num_remote_tokens, _ = self.connector.get_num_new_matched_tokens(request.request_id, num_local_tokens)
        if num_remote_tokens is None:
            return LoadDecision.LIMIT_REACHED
        if not self._leaves_room(request, places):
            return LoadDecision.WOULD_SQUEEZE
        num_new_tokens = self._num_slots_to_go_on(request) - num_local_tokens
        if self._kv.allocate_slots(request, num_new_tokens, hit, num_headroom_blocks=num_headroom_blocks) is None:
            return LoadDecision.NO_ROOM
        self._wait(request, num_local_tokens, self._config.handoff_timeout_s, now_s)
        prompt_block_ids = self._kv.get_block_ids(request.request_id)[: self._kv.num_blocks_for(request.num_tokens)]
        self.connector.update_state_after_alloc(request.request_id, prompt_block_ids, num_local_tokens)
        return LoadDecision.STARTED

    def start_prefix_load(
        self, request: Request, hit: list[KVCacheBlock], places: Places, num_headroom_blocks: int, now_s: float
    ) -> bool:
        """Reserve blocks for a request, and ask for what others have of its prefix beyond its hit here.

        Returns False, with nothing changed, if there is nothing to be had, or no room to wait for it with all blocks.
        """
        loads = self.prefix_loads
        # They are reserved before blocks are taken here, as that may push out what is stored.
        num_blocks = loads.reserve(request, hit)
        if not num_blocks:
            return False
        num_local_tokens = len(hit) * self._kv.block_size
        num_new_tokens = self._num_slots_to_go_on(request) - num_local_tokens
        if (
            not self._leaves_room(request, places)
            or self._kv.allocate_slots(request, num_new_tokens, hit, num_headroom_blocks=num_headroom_blocks) is None
        ):
            loads.give_up(request)
            return False
        loads.start(request, len(hit), num_blocks)
        self._wait(request, num_local_tokens, self._config.prefix_load_timeout_s, now_s)
        return True

    def _wait(self, request: Request, num_local_tokens: int, timeout_s: float, now_s: float) -> None:
        """A load of the request begins."""
        if request.scheduled_at_s is None:
            self._kv.count_lookup(request, num_local_tokens)
            request.num_cached_tokens = num_local_tokens
            request.scheduled_at_s = now_s
        request.set_status(RequestStatus.WAITING_FOR_REMOTE_KVS, now_s)
        self.loading[request.request_id] = request
        self._load_deadlines.push(request.request_id, (now_s + timeout_s,))

    def _leaves_room(self, consumer: Request, places: Places) -> bool:
        """Whether each admitted request can grow beside all pinned blocks, this load's included.

        By max_tokens, one client could keep everybody's loads out: it looks as far ahead as a load takes.
        """
        num_blocks_of = self._kv.num_blocks_of
        num_own = self._kv.num_blocks_for(self._num_slots_to_go_on(consumer))
        num_pinned = num_own + self.prefix_loads.num_lent_blocks() + self.embeddings.num_blocks()
        num_pinned += sum(num_blocks_of(request_id) for request_id in (*self.loading, *self.held))
        max_growth = max(0, self._num_blocks_soon(consumer) - num_own)
        for request in self.loading.values():
            max_growth = max(max_growth, self._num_blocks_soon(request) - num_blocks_of(request.request_id))
        for request in places.all_holding():
            max_growth = max(max_growth, self._num_blocks_soon(request))
            if request.transfer_role is TransferRole.PRODUCER:
                num_pinned += num_blocks_of(request.request_id)
        num_pinned += places.running.num_producer_blocks()
        num_tokens_soon = places.running.max_consumer_tokens(self._num_growth_tokens)
        max_growth = max(max_growth, self._kv.num_blocks_for(num_tokens_soon))
        return num_pinned + max_growth <= self._kv.block_pool.num_blocks

    def _num_slots_to_go_on(self, request: Request) -> int:
        """The slots that a request has before its load begins, so that it needs no more to run when the load is over.

        If it did, two whose loads are over could each wait for the other's blocks.
        """
        num_slots = request.num_tokens + 1
        if request.computes_prompt_only:
            return num_slots
        return max(num_slots, min(num_slots + self._num_lookahead_tokens, request.max_num_tokens))

    def _num_blocks_soon(self, request: Request) -> int:
        num_tokens = min(request.max_num_tokens, request.num_tokens + 1 + self._num_growth_tokens)
        return self._kv.num_blocks_for(num_tokens)

    def release(self, request: Request, end: ProducerEnd, first_token_id: int | None = None) -> None:
        """Take a finished request out of every place here, and free its blocks once no link uses them."""
        self.blocked_producers.pop(request.request_id, None)
        self.blocked_consumers.remove_request(request)
        self.loading.pop(request.request_id, None)
        self._load_deadlines.remove(request.request_id)
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

    def proceed(self, places: Places, now_s: float) -> None:
        """Before a step is made: cancel what is overdue, and move embeddings for which there is room."""
        self._cancel_overdue_loads(now_s)
        self.embeddings.proceed(places, self.blocked_consumers, now_s)

    def _cancel_overdue_loads(self, now_s: float) -> None:
        """Cancel the loads whose deadline has passed; the failure policy applies when they have drained."""
        while (first := self._load_deadlines.peek()) is not None and first[0][0] <= now_s:
            self._load_deadlines.remove(first[1])
            self._cancel_load(first[1])

    def next_deadline(self) -> float | None:
        """Return the engine's clock at the earliest deadline of a load, or of embeddings, in seconds."""
        first = self._load_deadlines.peek()
        deadlines = (first and first[0][0], self.embeddings.next_deadline())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def update(
        self, output: KVConnectorOutput, requests: Mapping[str, Request], places: Places, now_s: float
    ) -> list[Ending]:
        """Take in what the connector's worker side reports, and return the requests that end by it."""
        assert self.connector is not None, "only a connector has an output"
        self.prefix_loads.end_step(now_s)
        for request_id, num_tokens in self.prefix_loads.take_over(output):
            self._finish_prefix_load(request_id, num_tokens, places, now_s)
        if output.wanted_prefixes:
            wants = self.embeddings.take_wants(output.wanted_prefixes, now_s)
            self.prefix_loads.lend(wants, places.running.num_blocks_due(_LOAN_STEPS))
        self.connector.update_connector_output(output)
        self.transfer_stats = output.stats or self.transfer_stats
        self.store_stats = output.store_stats or self.store_stats
        endings: list[Ending] = []
        for request_id in sorted(output.ready_to_prefill):
            if (producer := self.blocked_producers.pop(request_id, None)) is not None:
                places.waiting.restore_request(producer)
        for request_id, reason in output.failed_sending.items():
            endings += self._end_producer(request_id, reason, requests)
        for request_id in output.finished_sending:
            if not (self.prefix_loads.take_back(request_id) or self.embeddings.take_back(request_id)):
                self._free_held(request_id, TransferRole.PRODUCER)
        for request_id in {request_of(name) for name in output.doomed_loads} & self.loading.keys():
            self._cancel_load(request_id)
        for request_id, received in output.finished_recving.items():
            if is_fetch(request_id) or self.embeddings.take_over(request_id, output):
                continue
            loaded = self.loading.pop(request_id, None)
            if loaded is None:
                self._free_held(request_id, TransferRole.CONSUMER)
            else:
                self._load_deadlines.remove(request_id)
                endings += self._finish_load(loaded, received, places, now_s)
        return endings

    def _finish_prefix_load(self, request_id: str, num_tokens: int | None, places: Places, now_s: float) -> None:
        """Let a request go on from what is here of its prefix now."""
        request = self.loading.pop(request_id, None) if num_tokens is not None else None
        if request is None or num_tokens is None:
            self._free_held(request_id, TransferRole.CONSUMER)
            return
        self._load_deadlines.remove(request_id)
        if not request.is_known_to_worker:
            request.num_cached_tokens = num_tokens
        self._go_on(request, num_tokens, places, now_s)

    def _end_producer(self, request_id: str, reason: str, requests: Mapping[str, Request]) -> list[Ending]:
        request = requests.get(request_id)
        if request is not None and request.transfer_role is TransferRole.PRODUCER:
            return [Ending(request, RequestStatus.FINISHED_ERROR, f"handoff failed: {reason}")]
        # A held one has been finished already and waits for finished_sending, and so has what is lent.
        is_lent = request_id in self.prefix_loads.lent or request_id in self.embeddings
        self.num_late_completions += request_id not in self.held and not is_lent
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

    def _finish_load(self, request: Request, received: ReceivedKV, places: Places, now_s: float) -> list[Ending]:
        """Let a consumer go on from what has arrived. Nothing writes its blocks any more."""
        request.transfer_role = None
        request.transfer_timings = received.timings
        if received.outcome is LoadOutcome.RELEASED:
            return [Ending(request, RequestStatus.FINISHED_STOPPED, is_silent=True)]
        token_id, reason = received.first_token_id, received.reason or "the load failed"
        if received.outcome is LoadOutcome.LOADED and token_id is not None:
            if token_id < self._vocab_size:
                return self._join(request, token_id, places, now_s)
            reason = f"the producer's token {token_id} is not one of the model's {self._vocab_size}"
        if received.outcome is LoadOutcome.CANCELLED:
            reason = f"no KV within {self._config.handoff_timeout_s:g} s"
        if self._config.load_failure_policy == "fail":
            return [Ending(request, RequestStatus.FINISHED_ERROR, f"handoff failed: {reason}")]
        self._recompute(request, received.num_valid_tokens, places, now_s)
        return []

    def _join(self, request: Request, first_token_id: int, places: Places, now_s: float) -> list[Ending]:
        """All KV is here: append the producer's token, whose own KV is the first that this engine computes."""
        request.num_computed_tokens = request.num_tokens
        self._kv.cache_blocks(request, request.num_tokens)
        self._kv.offer_prompt_tail(request)
        request.set_status(RequestStatus.WAITING, now_s)
        request.append_output_token_ids(first_token_id)
        places.holding.add_request(request)
        if error := find_objection(self._structured_output, request, [first_token_id]):
            return [Ending(request, RequestStatus.FINISHED_ERROR, error)]
        # The producer has looked already; but this engine's limits may be tighter.
        stop = find_stop(request)
        return [] if stop is None else [Ending(request, stop)]

    def _recompute(self, request: Request, num_valid_tokens: int, places: Places, now_s: float) -> None:
        """Prefill the rest here, from the last whole block that is valid; one token at least is computed."""
        block_size = self._kv.block_size
        num_valid_tokens = max(num_valid_tokens, request.num_cached_tokens)
        num_kept_tokens = min(num_valid_tokens, request.num_tokens - 1) // block_size * block_size
        if not request.reads_prefix_cache:
            num_kept_tokens = 0
        if num_kept_tokens < request.num_cached_tokens:
            # Its last block came from the cache and may be shared: it must not be computed over. The rest of the hit
            # is found again at admission.
            request.set_status(RequestStatus.WAITING, now_s)
            self._kv.free(request)
            places.waiting.prepend_request(request)
        else:
            self._go_on(request, num_kept_tokens, places, now_s)

    def _go_on(self, request: Request, num_computed_tokens: int, places: Places, now_s: float) -> None:
        """Let a request whose load is over compute the rest, in its turn. It keeps its blocks."""
        self._kv.cache_blocks(request, num_computed_tokens)
        request.set_status(RequestStatus.WAITING, now_s)
        request.num_computed_tokens = num_computed_tokens
        places.holding.add_request(request)
