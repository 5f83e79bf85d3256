"""The waiting requests' part of a step: admits requests to the batch, and reserves blocks for loads."""

from __future__ import annotations

from typing import Final

from actors.config import SchedulerConfig
from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.blocks.prompt_tails import PartialHit
from actors.core.loads.handoff_loads import LoadDecision
from actors.core.loads.remote_kv import RemoteKV
from actors.core.queue.request_queue import RequestQueue, order_of
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request, RequestStatus
from actors.core.steps.preemption import num_blocks_left_by_victims
from actors.core.steps.step import SqueezingLoad, Step
from kv_transfer.params import TransferRole

_MAX_SQUEEZING_LOADS: Final = 8
"""Largest number of loads that others may pass in one step: each costs a look-up of its prefix in each step."""


class WaitingScheduler:
    """Takes waiting requests in the policy's order.

    The first one that has no room stops the scan: nothing overtakes it, so it can't starve. Requests that wait for
    a peer are set aside and never stop the scan. At most max_num_seqs requests pass a load whose blocks are free, but
    will be needed by the running requests. Others pass a request whose prefix is on its way here
    (arriving_prefixes.py), for a bounded time.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, queues: Queues, remote: RemoteKV
    ) -> None:
        self._config = config
        self._kv = kv_cache_manager
        self._queues = queues
        self._remote = remote
        self._num_watermark_blocks = int(config.watermark * kv_cache_manager.block_pool.num_blocks)

    def schedule_waiting(self, step: Step) -> None:
        """Admit requests in their order until the first that has no room, if any may join."""
        arriving = self._remote.arriving
        arriving.begin_step()
        if step.may_admit:
            self._schedule_waiting(step)
        has_prompts = bool(step.awaiting_prefix) and step.has_prompts(self._queues.running)
        arriving.end_step(step.now_s, has_prompts=has_prompts)

    def _schedule_waiting(self, step: Step) -> None:
        self._bring_back_loras(step)
        while (queue := self._next_queue(step)) is not None:
            request = queue.peek_request()
            if self._is_set_aside(request, queue, step):
                continue
            if request.transfer_role is TransferRole.CONSUMER:
                has_room = self._start_load(request, queue, step)
            else:
                has_room = self._has_free_row(step) and self._admit(request, queue, step)
            if not has_room:
                break
        for load in step.squeezing:
            load.request.num_passed += step.num_admitted - load.num_admitted_before
            load.queue.restore_request(load.request)
        for request in step.awaiting_prefix:
            self._queues.waiting.restore_request(request)

    def _bring_back_loras(self, step: Step) -> None:
        queues = self._queues
        queues.lora_waits.look(step.now_s)
        queues.lora_waits.bring_back_loads()
        queues.loaded_for_lora.bring_back(queues.loaded)
        queues.waiting_for_lora.bring_back(queues.waiting)

    def _is_set_aside(self, request: Request, queue: RequestQueue, step: Step) -> bool:
        """Set a request aside if the batch has no slot for its adapter: nobody has to wait behind it."""
        queues = self._queues
        slots = queues.loaded_for_lora if queue is queues.loaded else queues.waiting_for_lora
        if request.transfer_role is TransferRole.CONSUMER:
            # A load needs no slot: the request needs its slot only once its blocks have arrived.
            if queues.lora_waits.may_load(request):
                return False
            queues.lora_waits.hold_load(request, queue)
            return True
        if slots.may_join(request):
            return False
        queue.remove_request(request)
        slots.set_aside(request, step.now_s)
        return True

    def _next_queue(self, step: Step) -> RequestQueue | None:
        """Return the queue whose first request is next, or None if there is none.

        Requests that hold blocks go first. A blocked consumer was before all waiting requests but the preempted ones:
        since blocks were short for a preempted request, no load is started before it runs again.
        """
        if self._queues.loaded and self._has_free_row(step):
            return self._queues.loaded
        blocked = self._remote.blocked_consumers
        if blocked and not step.is_load_limit_reached:
            first = self._queues.waiting.peek_request() if self._queues.waiting else None
            if first is None or self._goes_before(blocked.peek_request(), first):
                return blocked
        return self._queues.waiting or None

    def _goes_before(self, blocked: Request, first: Request) -> bool:
        if self._config.policy == "priority":
            return order_of(blocked, self._config) < order_of(first, self._config)
        return first.status is not RequestStatus.PREEMPTED

    def _has_free_row(self, step: Step) -> bool:
        return step.token_budget > 0 and len(self._queues.running) < self._config.max_num_seqs

    def _start_load(self, request: Request, queue: RequestQueue, step: Step) -> bool:
        """Reserve a consumer's blocks; it needs neither tokens nor a row. Returns whether others may follow."""
        # Loads further ahead than one batch would only take blocks from the running requests.
        num_loaded = len(self._queues.loaded) + len(self._queues.loaded_for_lora)
        num_ahead = len(self._remote.loading) + num_loaded
        if step.is_load_limit_reached or num_ahead >= self._config.max_num_seqs:
            decision = LoadDecision.LIMIT_REACHED
        else:
            headroom = self._num_headroom_blocks(request)
            decision = self._remote.start_load(request, self._queues, headroom, step.now_s)
        if decision is LoadDecision.WOULD_SQUEEZE:
            decision = self._set_load_aside(request, queue, step)
        if decision is LoadDecision.STARTED:
            queue.pop_request()
            step.num_admitted += 1
        elif decision is LoadDecision.LIMIT_REACHED:
            step.is_load_limit_reached = True
            if queue is not self._remote.blocked_consumers:
                queue.remove_request(request)
                self._remote.blocked_consumers.add_request(request)
        return decision is not LoadDecision.NO_ROOM

    def _set_load_aside(self, request: Request, queue: RequestQueue, step: Step) -> LoadDecision:
        """Let others pass a load whose blocks the running requests will need, until max_num_seqs requests have.

        From then on the load stops the scan, or it could wait behind smaller requests for ever.
        """
        if request.num_passed >= self._config.max_num_seqs or len(step.squeezing) >= _MAX_SQUEEZING_LOADS:
            return LoadDecision.NO_ROOM
        queue.remove_request(request)
        step.squeezing.append(SqueezingLoad(request, queue, step.num_admitted))
        return LoadDecision.WOULD_SQUEEZE

    def _admit(self, request: Request, queue: RequestQueue, step: Step) -> bool:
        """Move a waiting request into the batch, if there is room; a producer without READY is set aside.

        Returns whether others may follow.
        """
        kv = self._kv
        has_blocks = queue is self._queues.loaded
        may_wait = not has_blocks and request.scheduled_at_s is None and request.reads_prefix_cache
        if may_wait and self._remote.arriving.goes_on_waiting(request, self._num_in_queue(step), step.now_s):
            self._await_prefix(request, step)
            return True
        hit = [] if has_blocks else kv.get_computed_blocks(request)
        num_hit_tokens = len(hit) * self._kv.block_size
        if not self._remote.may_prefill(request, num_hit_tokens):
            queue.remove_request(request)
            self._remote.blocked_producers[request.request_id] = request
            self._queues.lora_waits.end(request)
            return True
        if not has_blocks and self._remote.start_prefix_load(
            request, hit, self._queues, self._num_headroom_blocks(request), step.now_s
        ):
            queue.pop_request()
            self._queues.lora_waits.end(request)
            step.num_admitted += 1
            return True
        if may_wait and self._remote.arriving.begins_to_wait(request, len(hit), self._num_in_queue(step), step.now_s):
            self._await_prefix(request, step)
            return True
        partial_hit = None if has_blocks else kv.find_partial_block(request, hit)
        if partial_hit is not None:
            num_hit_tokens += partial_hit.num_tokens
        num_missing_tokens = request.num_tokens - request.num_computed_tokens - num_hit_tokens
        num_new_tokens = step.num_new_tokens(request, num_missing_tokens, self._queues)
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        if kv.snapshots is not None and self._config.enable_chunked_prefill:
            kv.snapshots.plan(request, num_computed_tokens)
            num_new_tokens = kv.snapshots.cut_chunk(request, num_computed_tokens, num_new_tokens)
        if request.lacks_encoder_inputs(num_computed_tokens):
            queue.remove_request(request)
            step.lacking_inputs.append(request)
            return True
        chosen = step.choose_encoder_inputs(request, num_computed_tokens, num_new_tokens)
        if chosen is not None:
            num_new_tokens = chosen.num_new_tokens
        if num_new_tokens <= 0 or not self._has_room(request, hit, partial_hit, num_new_tokens):
            if chosen is not None:
                step.encoder.give_up(request, chosen)
            return False
        queue.pop_request()
        step.num_admitted += not has_blocks
        self._start_running(request, num_hit_tokens, step)
        if chosen is not None:
            step.encoder.take(request, chosen, num_computed_tokens)
        step.take(request, num_new_tokens)
        return True

    def _num_in_queue(self, step: Step) -> int:
        return len(self._queues.waiting) + len(step.awaiting_prefix)

    def _await_prefix(self, request: Request, step: Step) -> None:
        """Let others pass a request that has not run yet, in this step: its prefix is on its way here."""
        self._queues.waiting.remove_request(request)
        step.awaiting_prefix.append(request)

    def _has_room(
        self, request: Request, hit: list[KVCacheBlock], partial_hit: PartialHit | None, num_new_tokens: int
    ) -> bool:
        """Give a waiting request its prefix hit and blocks for num_new_tokens; returns whether the request got them.

        A producer gets its whole prompt's blocks, so it never needs more. A loaded request has all its blocks already:
        none is taken, so none is refused. Only requests that go on after their prompt get lookahead slots: with such
        slots, a prompt that fills the pool would never fit, although the engine has accepted it.
        """
        is_producer = request.transfer_role is TransferRole.PRODUCER
        num_hit_tokens = len(hit) * self._kv.block_size
        if partial_hit is not None:
            num_hit_tokens += partial_hit.num_tokens
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_slots = request.num_tokens - num_computed_tokens if is_producer else num_new_tokens
        num_slots_in_all = request.num_tokens
        if not request.computes_prompt_only:
            num_lookahead, num_possible = self._config.num_lookahead_tokens, request.max_num_tokens
            num_slots = min(num_slots + num_lookahead, max(num_slots, num_possible - num_computed_tokens))
            num_slots_in_all = min(num_slots_in_all + num_lookahead, max(num_slots_in_all, num_possible))
        headroom = self._num_headroom_blocks(request)
        new_blocks = self._kv.allocate_slots(
            request,
            num_slots,
            hit,
            partial_hit=partial_hit,
            num_slots_that_must_fit=num_slots_in_all,
            num_headroom_blocks=headroom,
        )
        return new_blocks is not None

    def _start_running(self, request: Request, num_hit_tokens: int, step: Step) -> None:
        self._queues.lora_waits.end(request)
        request.num_computed_tokens += num_hit_tokens
        if request.is_known_to_worker:
            step.resumed.add(request.request_id)
        elif request.scheduled_at_s is None:
            request.scheduled_at_s = step.now_s
            request.num_cached_tokens = num_hit_tokens
            self._kv.count_lookup(request, num_hit_tokens)
        request.set_status(RequestStatus.RUNNING, step.now_s)
        num_slots = self._kv.num_blocks_of(request.request_id) * self._kv.block_size
        is_plain = self._config.num_lookahead_tokens == 0
        self._queues.running.add(request, num_slots, runs_ahead=self._may_run_ahead(request), is_plain=is_plain)

    def _may_run_ahead(self, request: Request) -> bool:
        """Whether a step may be scheduled before the token of the one before it is known.

        After a step that asks for drafts no request runs ahead (Step.build_output): drafts follow known tokens, and
        requests with drafts would be in every other step only, if the others ran ahead.
        """
        return bool(self._config.overlap) and request.may_run_ahead

    def _num_headroom_blocks(self, request: Request) -> int:
        """How many free blocks an admission leaves to the running requests; 0 while none runs.

        A request that was stopped early leaves more than that, or it would be stopped again at once.
        """
        rows = self._queues.running
        if not rows:
            return 0
        if self._kv.snapshots is None or request.status is not RequestStatus.PREEMPTED:
            return self._num_watermark_blocks
        return max(self._num_watermark_blocks, num_blocks_left_by_victims(rows))
