"""The running requests' part of a step, and preemption."""

from __future__ import annotations

from actors.config import SchedulerConfig
from actors.core.block_pool import KVCacheBlock
from actors.core.kv_cache_manager import KVCacheManager
from actors.core.places import Places
from actors.core.request import Request, RequestStatus
from actors.core.step import Step
from kv_transfer.params import TransferRole


class Batch:
    """Gives the running requests their tokens and blocks."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, places: Places) -> None:
        self.num_preemptions = 0
        self._config = config
        self._kv = kv_cache_manager
        self._places = places

    def schedule_running(self, step: Step) -> None:
        """Schedule what each running request still has to compute, preempting where blocks are short."""
        running = self._places.running
        for request in list(running.values()):
            if step.token_budget <= 0:
                break
            # A request further on may have been preempted for one before it.
            num_new_tokens = step.num_new_tokens(request, 0, self._places) if request.request_id in running else 0
            if num_new_tokens <= 0:
                continue
            new_blocks = self._allocate_or_preempt(request, num_new_tokens, step)
            if new_blocks is not None:
                step.take(request, num_new_tokens)
                if new_blocks:
                    step.new_block_ids[request.request_id] = [block.block_id for block in new_blocks]

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, step: Step) -> list[KVCacheBlock] | None:
        """Return the new blocks of a running request, or None if it was itself preempted."""
        while (new_blocks := self._kv.allocate_slots(request, num_new_tokens)) is None:
            victim = self._choose_victim()
            self._preempt(victim, step)
            if victim is request:
                return None
        return new_blocks

    def _choose_victim(self) -> Request:
        """Choose who loses its blocks, the request that needs them not excepted.

        Never a producer: its link reads its blocks. It never asks for any either, since it has its whole prompt's, so
        there is always another running request: the one that asks.
        """
        candidates = (
            r for r in reversed(self._places.running.values()) if r.transfer_role is not TransferRole.PRODUCER
        )
        if self._config.policy == "priority":
            return max(candidates, key=lambda request: request.order)
        return next(candidates)

    def _preempt(self, request: Request, step: Step) -> None:
        step.refund(request)
        step.preempted.add(request.request_id)
        del self._places.running[request.request_id]
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.set_status(RequestStatus.PREEMPTED, step.now_s)
        self._places.waiting.prepend_request(request)
