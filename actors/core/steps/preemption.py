"""Chooses the running request that loses its blocks when another one needs blocks and too few are free.

A request with a recurrent state can go on later only from the end of a block, since the prefix cache knows the states
after full blocks alone, and only while no block of its prefix is used again. So the next victim stops where it has
filled a block, a little before blocks run out: its slot becomes a snapshot, and what the others take next is still free
of it.
"""

from __future__ import annotations

import enum
from typing import Final

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.queue.request_queue import order_of
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request, RequestStatus
from actors.core.requests.running_rows import RunningRows
from actors.core.steps.client_outputs import ClientOutputs
from actors.core.steps.step import Step, Victim
from kv_transfer.params import TransferRole

_NUM_BLOCKS_LEFT: Final = 2
"""How many blocks are left for each running request when a request with a recurrent state stops."""


class Room(enum.Enum):
    """Whether there are blocks for a running request."""

    NOW = enum.auto()
    LATER = enum.auto()
    """The steps under way may free blocks or bring a token: try again when they are over."""
    NEVER = enum.auto()
    """The request itself was preempted."""


class Preemptor:
    """Preempts running requests: a victim waits before its equals, and starts over from its cached prefix."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        queues: Queues,
        client_outputs: ClientOutputs,
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._kv = kv_cache_manager
        self._queues = queues
        self._rows = queues.running
        self._client_outputs = client_outputs

    def make_room(self, request: Request, num_blocks: int, step: Step) -> Room:
        """Preempt requests until num_blocks blocks are free for a running request."""
        pool = self._kv.block_pool
        while num_blocks > pool.num_free_blocks:
            if num_blocks <= pool.num_free_blocks + self._kv.num_fenced_blocks:
                step.somebody_waits_for_blocks = True
                return Room.LATER
            victim = self._choose_victim()
            if victim is request and self._rows.num_expected[request.row] > request.num_tokens:
                # Preemption would discard the token that is being computed, and the request would reach this line again
                # and again.
                step.somebody_waits_for_blocks = True
                return Room.LATER
            self.preempt(victim, step)
            if victim is request:
                return Room.NEVER
        return Room.NOW

    def stops(self, request: Request, step: Step) -> bool:
        """Preempt a request with a state that has filled its last block, if it is the next victim and blocks are few.

        Returns whether the request gets no token in this step: it may also wait for the token under way first.
        """
        kv, rows = self._kv, self._rows
        num_computed_tokens = request.num_computed_tokens
        if kv.snapshots is None or num_computed_tokens % kv.block_size or not request.reads_prefix_cache:
            return False
        num_blocks = kv.block_pool.num_free_blocks + kv.num_fenced_blocks
        is_plenty = num_blocks >= num_blocks_left_by_victims(rows)
        if is_plenty or num_computed_tokens < request.num_prompt_tokens or self._choose_victim() is not request:
            return False
        if rows.num_candidates() < 2:
            return False
        if rows.num_expected[request.row] > request.num_tokens:
            step.drop_steady(request.row)
            step.somebody_waits_for_blocks = True
        else:
            self.preempt(request, step)
        return True

    def _choose_victim(self) -> Request:
        """Choose the request that loses its blocks; the request that needs blocks may be chosen too.

        A producer is never chosen, since a link reads its blocks. A producer never needs blocks either, since it holds
        those of its whole prompt, so there is always a candidate: the request that needs blocks.
        """
        candidates = (r for r in self._rows.last_admitted() if r.transfer_role is not TransferRole.PRODUCER)
        if self._config.policy == "priority":
            return max(candidates, key=lambda request: order_of(request, self._config))
        return next(candidates)

    def preempt(self, request: Request, step: Step) -> None:
        """Take a running request out of the step and of the batch; it starts over when there is room."""
        step.refund(request)
        step.encoder.cache.free(request)
        step.preempted[request.request_id] = Victim(request, self._kv.leave_prefix(request))
        self._rows.remove(request)
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.set_status(RequestStatus.PREEMPTED, step.now_s)
        self._queues.waiting.prepend_request(request)

    def tell_of_preempted(self, step: Step) -> None:
        """Tell clients which requests were preempted: another engine may have room for them."""
        num_blocks = 0
        num_free_blocks = self._kv.block_pool.num_free_blocks + self._kv.num_fenced_blocks
        # The last victim is at the head of the waiting queue, so it is admitted first.
        for victim in reversed(step.preempted.values()):
            num_blocks += self._kv.num_blocks_with_slot(victim.request.num_tokens)
            num_steps = self._rows.num_steps_until_free(num_blocks, num_free_blocks, self._kv.states.num_blocks)
            self._client_outputs.add_preemption(victim.request, Preemption(victim.num_left_tokens, num_steps))


def num_blocks_left_by_victims(rows: RunningRows) -> int:
    """Return with how many free blocks the next victim stops, if requests have recurrent states."""
    return _NUM_BLOCKS_LEFT * rows.num_candidates()
