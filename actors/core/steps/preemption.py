"""Preemption: which running request loses its blocks when another one needs some and too few are free."""

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
    """There is more to know, or to have, when the steps under way are over."""
    NEVER = enum.auto()
    """The request itself was preempted."""


class Preemptor:
    """Takes blocks from running requests: a victim waits at the head, and starts over from its cached prefix."""

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
        """Preempt until so many blocks are free for a running request."""
        pool = self._kv.block_pool
        while num_blocks > pool.num_free_blocks:
            if num_blocks <= pool.num_free_blocks + self._kv.num_fenced_blocks:
                step.somebody_waits_for_blocks = True
                return Room.LATER
            victim = self._choose_victim()
            if victim is request and self._rows.num_expected[request.row] > request.num_tokens:
                # The token that is under way would be void, and the request come back to where it is now, for ever.
                step.somebody_waits_for_blocks = True
                return Room.LATER
            self.preempt(victim, step)
            if victim is request:
                return Room.NEVER
        return Room.NOW

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
        self._queues.waiting.prepend_request(request)

    def tell_of_preempted(self, step: Step) -> None:
        """Let clients know who has lost its blocks: another engine may have room for it."""
        num_blocks = 0
        num_free_blocks = self._kv.block_pool.num_free_blocks + self._kv.num_fenced_blocks
        # The last victim is at the head.
        for victim in reversed(step.preempted.values()):
            num_blocks += self._kv.num_blocks_for(victim.request.num_tokens)
            num_steps = self._rows.num_steps_until_free(num_blocks, num_free_blocks)
            self._client_outputs.add_preemption(victim.request, Preemption(victim.num_computed_tokens, num_steps))
