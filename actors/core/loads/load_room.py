"""Decides whether there is room for one more load, so that loads do not take the blocks that running requests need.

A load may begin only if all admitted requests would still have enough blocks to grow, beside all pinned blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from kv_transfer.params import TransferRole

_MAX_GROWTH_TOKENS: Final = 256
_MAX_GROWTH: Final = 8
"""A request is assumed to grow by _MAX_GROWTH_TOKENS tokens during a load, but by at most an eighth of the blocks."""


class LoadRoom:
    """Decides whether a load may begin; only the engine thread may call it."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        loading: Mapping[str, Request],
        held: Mapping[str, Request],
        num_other_pinned_blocks: Callable[[], int],
        num_lookahead_tokens: int,
    ) -> None:
        """loading, held: requests whose blocks links may use; num_other_pinned_blocks: counts other pinned blocks."""
        self._kv = kv_cache_manager
        self._loading = loading
        self._held = held
        self._num_other_pinned_blocks = num_other_pinned_blocks
        self._num_lookahead_tokens = num_lookahead_tokens
        num_slots = kv_cache_manager.block_pool.num_blocks * kv_cache_manager.block_size
        self._num_growth_tokens = min(_MAX_GROWTH_TOKENS, num_slots // _MAX_GROWTH)

    def is_left_by(self, consumer: Request, queues: Queues) -> bool:
        """Whether each admitted request can grow beside all pinned blocks, if the consumer's load begins too.

        The growth that counts is that during one load. If a request counted with max_tokens, one client with a large
        max_tokens could prevent all loads.
        """
        num_blocks_of = self._kv.num_held_by
        num_own = self._kv.num_blocks_with_slot(self.num_slots_to_go_on(consumer))
        num_pinned = num_own + self._num_other_pinned_blocks()
        num_pinned += sum(num_blocks_of(request_id) for request_id in (*self._loading, *self._held))
        max_growth = max(0, self._num_blocks_soon(consumer) - num_own)
        for request in self._loading.values():
            max_growth = max(max_growth, self._num_blocks_soon(request) - num_blocks_of(request.request_id))
        for request in queues.all_loaded():
            max_growth = max(max_growth, self._num_blocks_soon(request))
            if request.transfer_role is TransferRole.PRODUCER:
                num_pinned += num_blocks_of(request.request_id)
        rows = queues.running
        num_pinned += rows.num_producer_blocks() + int(rows.is_producer.sum()) * self._kv.states.num_blocks
        if num_tokens_soon := rows.max_consumer_tokens(self._num_growth_tokens):
            max_growth = max(max_growth, self._kv.num_blocks_with_slot(num_tokens_soon))
        return num_pinned + max_growth <= self._kv.block_pool.num_blocks

    def num_slots_to_go_on(self, request: Request) -> int:
        """Return how many slots a request reserves before its load begins: all that it needs to run after the load.

        If requests needed further slots after their loads, two of them could each wait for the other's blocks.
        """
        num_slots = request.num_tokens + 1
        if request.computes_prompt_only:
            return num_slots
        return max(num_slots, min(num_slots + self._num_lookahead_tokens, request.max_num_tokens))

    def _num_blocks_soon(self, request: Request) -> int:
        num_tokens = min(request.max_num_tokens, request.num_tokens + 1 + self._num_growth_tokens)
        return self._kv.num_blocks_with_slot(num_tokens)
