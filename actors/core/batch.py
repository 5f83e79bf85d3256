"""The running requests' part of a step, and preemption."""

from __future__ import annotations

import enum

import numpy as np

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.outbox import Outbox
from actors.core.outputs import Preemption
from actors.core.queue.places import Places
from actors.core.queue.request_queue import order_of
from actors.core.requests.request import Request, RequestStatus
from actors.core.step import Step, Victim
from kv_transfer.params import TransferRole


class _Room(enum.Enum):
    """Whether there are blocks for a running request."""

    NOW = enum.auto()
    LATER = enum.auto()
    """There is more to know, or to have, when the steps under way are over."""
    NEVER = enum.auto()
    """The request itself was preempted."""


class Batch:
    """Gives the running requests their tokens and blocks.

    Rows that decode one token each come first: they are never slowed down by a prompt. Most of them have a slot left
    in their last block, so that they cost a few vector operations together.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, places: Places, outbox: Outbox
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._kv = kv_cache_manager
        self._places = places
        self._rows = places.running
        self._outbox = outbox

    def schedule_running(self, step: Step) -> None:
        """Schedule what each running request still has to compute, preempting where blocks are short."""
        steady_rows, others = self._rows.due()
        step.take_steady(steady_rows)
        self._grow_steady(step)
        for request in others:
            if step.token_budget <= 0:
                break
            # It may have been preempted for one before it.
            if request.status is RequestStatus.RUNNING:
                self._schedule_one(request, step)
        # Where requests may join, they may come back at once.
        if step.preempted and not step.may_admit:
            self._tell_of_preempted(step)

    def _tell_of_preempted(self, step: Step) -> None:
        """Let clients know who has lost its blocks: another engine may have room for it."""
        num_blocks = 0
        num_free_blocks = self._kv.block_pool.num_free_blocks + self._kv.num_fenced_blocks
        # The last victim is at the head.
        for victim in reversed(step.preempted.values()):
            num_blocks += self._kv.num_blocks_for(victim.request.num_tokens)
            num_steps = self._rows.num_steps_until_free(num_blocks, num_free_blocks)
            self._outbox.add_preemption(victim.request, Preemption(victim.num_computed_tokens, num_steps))

    def _grow_steady(self, step: Step) -> None:
        """Give a block to each steady row whose last one is full."""
        rows = self._rows
        is_full = rows.num_computed[step.steady_rows] == rows.num_slots[step.steady_rows]
        growing = step.steady_rows[is_full]
        if len(growing) > self._kv.block_pool.num_free_blocks:
            self._grow_in_order(growing, step)
            return
        if not len(growing):
            return
        for row, request_id in zip(growing.tolist(), rows.req_ids[growing].tolist(), strict=True):
            step.new_block_ids[row] = [self._kv.grow(request_id)]
        rows.num_slots[growing] += self._kv.block_size

    def _grow_in_order(self, growing: np.ndarray, step: Step) -> None:
        """Blocks are short: those that were admitted first get theirs, by preemption if need be."""
        rows = self._rows
        for request in rows.requests[growing[np.argsort(rows.epochs[growing])]].tolist():
            if request.status is not RequestStatus.RUNNING:
                continue
            room = self._make_room(request, 1, step)
            if room is _Room.NOW:
                step.new_block_ids[request.row] = [self._kv.grow(request.request_id)]
                rows.num_slots[request.row] += self._kv.block_size
            elif room is _Room.LATER:
                step.drop_steady(request.row)

    def _schedule_one(self, request: Request, step: Step) -> None:
        rows, row = self._rows, request.row
        if request.spec_token_ids:
            self._drop_drafts_without_blocks(request)
        num_missing_tokens = int(rows.num_expected[row] - rows.num_computed[row])
        num_new_tokens = step.num_new_tokens(request, num_missing_tokens, self._places)
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
        """Nobody is preempted for a guess: without free blocks there is room for those in the request's own slots."""
        num_slots = int(self._rows.num_slots[request.row]) + self._kv.block_pool.num_free_blocks * self._kv.block_size
        del request.spec_token_ids[max(0, num_slots - request.num_tokens) :]

    def _has_room(self, request: Request, num_new_tokens: int, step: Step) -> bool:
        """Give a running request the blocks that it needs for so many tokens; returns whether it got them."""
        rows, row = self._rows, request.row
        num_slots = request.num_computed_tokens + num_new_tokens
        if not request.computes_prompt_only:
            num_slots = max(num_slots, min(num_slots + self._config.num_lookahead_tokens, request.max_num_tokens))
        num_new_blocks = self._kv.num_blocks_for(num_slots) - rows.num_blocks_of(row)
        if self._make_room(request, num_new_blocks, step) is not _Room.NOW:
            return False
        if num_new_blocks > 0:
            step.new_block_ids[row] = [self._kv.grow(request.request_id) for _ in range(num_new_blocks)]
            rows.num_slots[row] += num_new_blocks * self._kv.block_size
        return True

    def _make_room(self, request: Request, num_blocks: int, step: Step) -> _Room:
        """Preempt until so many blocks are free for a running request."""
        pool = self._kv.block_pool
        while num_blocks > pool.num_free_blocks:
            if num_blocks <= pool.num_free_blocks + self._kv.num_fenced_blocks:
                step.somebody_waits_for_blocks = True
                return _Room.LATER
            victim = self._choose_victim()
            if victim is request and self._rows.num_expected[request.row] > request.num_tokens:
                # The token that is under way would be void, and the request come back to where it is now, for ever.
                step.somebody_waits_for_blocks = True
                return _Room.LATER
            self.preempt(victim, step)
            if victim is request:
                return _Room.NEVER
        return _Room.NOW

    def _choose_victim(self) -> Request:
        """Choose who loses its blocks, the request that needs them not excepted.

        Never a producer: its link reads its blocks. It never asks for any either, since it has its whole prompt's, so
        there is always another running request: the one that asks.
        """
        candidates = (r for r in self._rows.last_admitted() if r.transfer_role is not TransferRole.PRODUCER)
        if self._config.policy == "priority":
            return max(candidates, key=lambda request: order_of(request, self._config))
        return next(candidates)

    def preempt(self, request: Request, step: Step) -> None:
        """Take a running request out of the step and of the batch; it starts over when there is room."""
        step.refund(request)
        step.encoder.cache.free(request)
        step.preempted[request.request_id] = Victim(request, request.num_computed_tokens)
        self._rows.remove(request)
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.set_status(RequestStatus.PREEMPTED, step.now_s)
        self._places.waiting.prepend_request(request)
