"""One step while it is being put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.config import SchedulerConfig
from actors.core.kv_cache_manager import KVCacheManager
from actors.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from actors.core.places import Places
from actors.core.request import Request
from kv_transfer.connector import ProducerProgress
from kv_transfer.params import TransferRole

_NO_BLOCK_IDS: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """What a step may still take, and what it has taken.

    Invariant: token_budget + sum(num_scheduled_tokens) is what the step began with.
    """

    config: SchedulerConfig
    token_budget: int
    now_s: float
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    is_load_limit_reached: bool = False
    num_prompt_tokens: int = 0
    producer_progress: list[ProducerProgress] = field(default_factory=list)

    def num_new_tokens(self, request: Request, num_hit_tokens: int, places: Places) -> int:
        """How many tokens the request gets in this step; 0 if it has to wait for an emptier one."""
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_new_tokens = request.num_tokens_with_spec - num_computed_tokens
        if num_new_tokens <= 1:
            return min(num_new_tokens, self.token_budget)
        config = self.config
        if request.spec_token_ids:
            num_new_tokens = min(num_new_tokens, request.max_num_tokens - num_computed_tokens)
        if not config.enable_chunked_prefill:
            # What no step could hold in one piece is the recomputation of a prompt with its outputs: it is cut.
            is_possible = num_new_tokens <= config.max_num_batched_tokens
            return 0 if is_possible and num_new_tokens > self.token_budget else min(num_new_tokens, self.token_budget)
        threshold = config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens and places.others_wait(request):
            num_new_tokens = threshold
        return min(num_new_tokens, self.token_budget)

    def take(self, request: Request, num_new_tokens: int) -> None:
        """Schedule so many tokens of a request, drafts included."""
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        if request.spec_token_ids:
            num_drafts = request.num_computed_tokens + num_new_tokens - request.num_tokens
            if num_drafts > 0:
                self.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def refund(self, request: Request) -> None:
        """Take a victim back out of the step, if it is in it."""
        self.token_budget += self.num_scheduled_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)
        self.spec_token_ids.pop(request.request_id, None)

    def build_output(
        self, requests: Mapping[str, Request], kv_cache_manager: KVCacheManager, finished_req_ids: set[str]
    ) -> SchedulerOutput:
        """Say what is to be computed, and count it as computed: the step is on its way."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        for request_id, num_new_tokens in self.num_scheduled_tokens.items():
            request = requests[request_id]
            if request.is_known_to_worker:
                self._add_cached(cached, request, kv_cache_manager)
            else:
                new.append(_describe(request, kv_cache_manager))
                request.is_known_to_worker = True
            if request.transfer_role is TransferRole.PRODUCER:
                self._add_progress(request, num_new_tokens, kv_cache_manager)
            self._count_prompt_tokens(request, num_new_tokens)
            request.num_computed_tokens += num_new_tokens
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted,
            scheduled_spec_decode_tokens=self.spec_token_ids,
        )

    def _count_prompt_tokens(self, request: Request, num_new_tokens: int) -> None:
        num_left = request.num_prompt_tokens - request.num_computed_tokens
        if num_left > 0:
            num_computed = min(num_left, num_new_tokens)
            request.num_prompt_tokens_computed += num_computed
            self.num_prompt_tokens += num_computed

    def _add_cached(self, cached: CachedRequestData, request: Request, kv_cache_manager: KVCacheManager) -> None:
        request_id = request.request_id
        is_resumed = request_id in self.resumed
        block_ids = (
            kv_cache_manager.get_block_ids(request_id)
            if is_resumed
            else list(self.new_block_ids.get(request_id, _NO_BLOCK_IDS))
        )
        cached.req_ids.append(request_id)
        cached.resumed_from_preemption.append(is_resumed)
        cached.new_token_ids.append([])
        cached.new_block_ids.append((block_ids,))
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(len(request.output_token_ids))

    def _add_progress(self, request: Request, num_new_tokens: int, kv_cache_manager: KVCacheManager) -> None:
        self.producer_progress.append(
            ProducerProgress(
                request_id=request.request_id,
                block_ids=tuple(kv_cache_manager.get_block_ids(request.request_id)),
                num_computed_tokens_before=request.num_computed_tokens,
                num_computed_tokens_after=request.num_computed_tokens + num_new_tokens,
            )
        )


def _describe(request: Request, kv_cache_manager: KVCacheManager) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        block_ids=(kv_cache_manager.get_block_ids(request.request_id),),
        num_computed_tokens=request.num_computed_tokens,
    )
