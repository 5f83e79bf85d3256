"""The running requests' part of a step: their tokens and blocks."""

from __future__ import annotations

import numpy as np

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request, RequestStatus
from actors.core.steps.preemption import Preemptor, Room
from actors.core.steps.step import Step


class RunningScheduler:
    """Gives the running requests their tokens and blocks.

    Rows that decode one token each come first: they are never slowed down by a prompt. Most of them have a slot left
    in their last block, so that they cost a few vector operations together.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, queues: Queues, preemptor: Preemptor
    ) -> None:
        self._config = config
        self._kv = kv_cache_manager
        self._queues = queues
        self._rows = queues.running
        self._preemptor = preemptor

    def schedule_running(self, step: Step) -> None:
        """Schedule what each running request still has to compute, preempting where blocks are short."""
        steady_rows, others = self._rows.due()
        step.take_steady(steady_rows)
        self._grow_steady(step)
        for request in others:
            if step.token_budget <= 0:
                break
            # An earlier request of this loop may have caused this request's preemption.
            if request.status is RequestStatus.RUNNING:
                self._schedule_one(request, step)
        # While waiting requests can be admitted, a victim may still be admitted in this step.
        if step.preempted and not step.may_admit:
            self._preemptor.tell_of_preempted(step)

    def _grow_steady(self, step: Step) -> None:
        """Give a block to each steady row whose last one is full."""
        rows = self._rows
        if not len(step.steady_rows):
            return
        is_full = rows.num_computed[step.steady_rows] == rows.num_slots[step.steady_rows]
        growing = step.steady_rows[is_full]
        if self._kv.snapshots is not None:
            growing = self._without_stopped(growing, step)
        if len(growing) > self._kv.block_pool.num_free_blocks:
            self._grow_in_order(growing, step)
            return
        if not len(growing):
            return
        for row, request_id in zip(growing.tolist(), rows.req_ids[growing].tolist(), strict=True):
            step.new_block_ids[row] = [self._kv.grow(request_id)]
        rows.num_slots[growing] += self._kv.block_size

    def _without_stopped(self, growing: np.ndarray, step: Step) -> np.ndarray:
        """Return the growing rows without those that stop here, since they would be preempted soon."""
        goes_on = [not self._preemptor.stops(request, step) for request in self._rows.requests[growing].tolist()]
        going_on: np.ndarray = growing[np.array(goes_on, dtype=bool)]
        return going_on

    def _grow_in_order(self, growing: np.ndarray, step: Step) -> None:
        """Give the growing rows blocks in the order of admission, by preemption if need be: too few blocks are free."""
        rows = self._rows
        for request in rows.requests[growing[np.argsort(rows.epochs[growing])]].tolist():
            if request.status is not RequestStatus.RUNNING:
                continue
            room = self._preemptor.make_room(request, 1, step)
            if room is Room.NOW:
                step.new_block_ids[request.row] = [self._kv.grow(request.request_id)]
                rows.num_slots[request.row] += self._kv.block_size
            elif room is Room.LATER:
                step.drop_steady(request.row)

    def _schedule_one(self, request: Request, step: Step) -> None:
        if self._preemptor.stops(request, step):
            return
        rows, row = self._rows, request.row
        if request.spec_token_ids:
            self._drop_drafts_without_blocks(request)
        num_missing_tokens = int(rows.num_expected[row] - rows.num_computed[row])
        num_new_tokens = step.num_new_tokens(request, num_missing_tokens, self._queues)
        if self._kv.snapshots is not None:
            num_new_tokens = self._kv.snapshots.cut_chunk(request, request.num_computed_tokens, num_new_tokens)
        chosen = step.choose_encoder_inputs(request, request.num_computed_tokens, num_new_tokens)
        if chosen is not None:
            num_new_tokens = chosen.num_new_tokens
        if num_new_tokens > 0 and self._has_room(request, num_new_tokens, step):
            if chosen is not None:
                step.encoder.take(request, chosen, request.num_computed_tokens)
            step.take(request, num_new_tokens)
        elif chosen is not None:
            step.encoder.give_up(request, chosen)

    def _drop_drafts_without_blocks(self, request: Request) -> None:
        """Drop the drafts that fit neither into the request's slots nor into free blocks: no draft preempts anyone."""
        num_slots = int(self._rows.num_slots[request.row]) + self._kv.block_pool.num_free_blocks * self._kv.block_size
        del request.spec_token_ids[max(0, num_slots - request.num_tokens) :]

    def _has_room(self, request: Request, num_new_tokens: int, step: Step) -> bool:
        """Give a running request the blocks that num_new_tokens need; returns whether the request got them."""
        rows, row = self._rows, request.row
        num_slots = request.num_computed_tokens + num_new_tokens
        if not request.computes_prompt_only:
            num_slots = max(num_slots, min(num_slots + self._config.num_lookahead_tokens, request.max_num_tokens))
        num_new_blocks = self._kv.num_blocks_for(num_slots) - rows.num_blocks_of(row)
        if self._preemptor.make_room(request, num_new_blocks, step) is not Room.NOW:
            return False
        if num_new_blocks > 0:
            step.new_block_ids[row] = [self._kv.grow(request.request_id) for _ in range(num_new_blocks)]
            rows.num_slots[row] += num_new_blocks * self._kv.block_size
        return True
