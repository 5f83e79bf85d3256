"""Chooses the running request that loses its blocks when another one needs blocks and too few are free."""

from __future__ import annotations

import enum

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.queue.request_queue import order_of
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request, RequestStatus
from actors.core.steps.client_outputs import ClientOutputs
from actors.core.steps.step import Step, Victim
from kv_transfer.params import TransferRole


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
        step.preempted[request.request_id] = Victim(request, request.num_computed_tokens)
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
            self._client_outputs.add_preemption(victim.request, Preemption(victim.num_computed_tokens, num_steps))
