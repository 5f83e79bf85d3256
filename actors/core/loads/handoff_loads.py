"""Loads the KV of consumers: of a whole prompt, which a producer on another engine computes."""

from __future__ import annotations

import enum

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.load_room import LoadRoom
from actors.core.loads.loading_requests import LoadingRequests
from actors.core.outputs.ending import Ending
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from actors.core.requests.stop import find_stop
from actors.core.requests.structured_output import StructuredOutputManager, find_objection
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.interface import KVConnectorScheduler
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV


class LoadDecision(enum.Enum):
    """The result of starting the load of the first waiting consumer."""

    STARTED = enum.auto()
    LIMIT_REACHED = enum.auto()
    """Too many loads are under way; other requests may pass."""
    WOULD_SQUEEZE = enum.auto()
    """The blocks are free, but admitted requests will need them; a limited number of other requests may pass."""
    NO_ROOM = enum.auto()
    """Too few blocks are free; no other request may pass."""


class HandoffLoads:
    """Starts and ends the loads of consumers; only the engine thread may call it."""

    def __init__(
        self,
        connector: KVConnectorScheduler | None,
        kv_cache_manager: KVCacheManager,
        *,
        loading: LoadingRequests,
        room: LoadRoom,
        config: KVTransferConfig,
        structured_output: StructuredOutputManager | None,
        vocab_size: int,
    ) -> None:
        """vocab_size: a first token from a producer has to be below it."""
        self._connector = connector
        self._kv = kv_cache_manager
        self._loading = loading
        self._room = room
        self._config = config
        self._structured_output = structured_output
        self._vocab_size = vocab_size

    def start(self, request: Request, queues: Queues, num_headroom_blocks: int, now_s: float) -> LoadDecision:
        """Reserve blocks for a consumer's prompt and for its first token's own KV, and ask for the KV."""
        assert self._connector is not None, "a request with a ticket is refused on arrival without a connector"
        hit = self._kv.get_computed_blocks(request)
        num_local_tokens = len(hit) * self._kv.block_size
        num_remote_tokens = self._connector.get_num_new_matched_tokens(request.request_id, num_local_tokens)
        if num_remote_tokens is None:
            return LoadDecision.LIMIT_REACHED
        if not self._room.is_left_by(request, queues):
            return LoadDecision.WOULD_SQUEEZE
        num_new_tokens = self._room.num_slots_to_go_on(request) - num_local_tokens
        if self._kv.allocate_slots(request, num_new_tokens, hit, num_headroom_blocks=num_headroom_blocks) is None:
            return LoadDecision.NO_ROOM
        self._loading.begin(request, num_local_tokens, self._config.handoff_timeout_s, now_s)
        block_ids = self._kv.get_handoff_ids(request)
        self._connector.update_state_after_alloc(request.request_id, block_ids, num_local_tokens)
        return LoadDecision.STARTED

    def finish(self, request: Request, received: ReceivedKV, queues: Queues, now_s: float) -> list[Ending]:
        """Let a consumer go on from the KV that has arrived, or return its end. No link writes its blocks any more."""
        request.transfer_role = None
        request.transfer_timings = received.timings
        if received.outcome is LoadOutcome.RELEASED:
            return [Ending(request, RequestStatus.FINISHED_STOPPED, is_silent=True)]
        reason = received.reason or "the load failed, and the connector gave no reason"
        if received.outcome is LoadOutcome.LOADED:
            token_id = received.first_token_id
            if token_id is not None and token_id < self._vocab_size:
                return self._join(request, token_id, queues, now_s)
            reason = (
                "the producer sent the prompt's whole KV without the first output token"
                if token_id is None
                else f"the producer's token {token_id} is not one of the model's {self._vocab_size} tokens"
            )
        if received.outcome is LoadOutcome.CANCELLED:
            reason = f"no KV arrived within {self._config.handoff_timeout_s:g} s"
        if self._config.load_failure_policy == "fail":
            return [Ending(request, RequestStatus.FINISHED_ERROR, f"handoff failed: {reason}")]
        self._recompute(request, received.num_valid_tokens, queues, now_s)
        return []

    def _join(self, request: Request, first_token_id: int, queues: Queues, now_s: float) -> list[Ending]:
        """Append the producer's token, since the prompt's KV has arrived. This engine computes the token's own KV."""
        request.num_computed_tokens = request.num_tokens
        self._kv.cache_blocks(request, request.num_tokens)
        self._kv.offer_prompt_tail(request)
        request.set_status(RequestStatus.WAITING, now_s)
        request.append_output_token_ids(first_token_id)
        queues.loaded.add_request(request)
        if error := find_objection(self._structured_output, request, [first_token_id]):
            return [Ending(request, RequestStatus.FINISHED_ERROR, error)]
        # The producer has checked whether the first token ends the request, but this engine's limits may be tighter.
        stop = find_stop(request)
        return [] if stop is None else [Ending(request, stop)]

    def _recompute(self, request: Request, num_valid_tokens: int, queues: Queues, now_s: float) -> None:
        """Let this engine prefill the rest of the prompt after the last whole valid block, at least one token."""
        block_size = self._kv.block_size
        num_valid_tokens = max(num_valid_tokens, request.num_cached_tokens)
        num_kept_tokens = min(num_valid_tokens, request.num_tokens - 1) // block_size * block_size
        if not request.reads_prefix_cache or self._kv.states:
            # Of the recurrent state, nothing or all has come, and all of it belongs to the end of the prompt.
            num_kept_tokens = 0
        if num_kept_tokens < request.num_cached_tokens:
            # The last block came from the prefix cache and other requests may share it, so it must not be overwritten.
            # Admission looks up the rest of the hit again.
            self._loading.start_over(request, queues, now_s)
        else:
            self._loading.go_on(request, num_kept_tokens, queues, now_s)
