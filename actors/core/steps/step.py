"""One step while it is being put together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.config import SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.drafts.draft_control import DraftControl
from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.encoder.encoder_scheduling import EncoderInputs, EncoderStep
from actors.core.outputs.scheduler_output import (
    NOTHING_GROWN,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
    StepBatch,
)
from actors.core.queue.request_queue import RequestQueue
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from actors.core.requests.running_rows import NO_ROWS, RunningRows
from actors.core.steps.chunk_budget import StepChunkBudget
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.steps import ProducerProgress
from kv_transfer.params import TransferRole


@dataclass(frozen=True, slots=True)
class Victim:
    """A request that lost its blocks in this step.

    num_left_tokens: of its tokens, how many the blocks serve until they are used again
    """

    request: Request
    num_left_tokens: int


@dataclass(frozen=True, slots=True)
class SqueezingLoad:
    """A load that was taken out of its queue for this step.

    num_admitted_before: requests that had got blocks in this step when the load was set aside
    """

    request: Request
    queue: RequestQueue
    num_admitted_before: int


@dataclass(slots=True)
class Step:
    """A step that is being put together: what it may still take, and what it has taken.

    Invariant: token_budget, the steady rows and the sum of num_scheduled_tokens are what the step began with.

    steady_rows: [n] int64, rows that decode one token each
    num_scheduled_tokens: tokens of all other requests, by request id, in batch order
    new_block_ids: what a row gets beyond the blocks that the worker knows of
    preempted: the victims by request id, the first one first
    squeezing: loads whose blocks the running requests will need
    awaiting_prefix: requests that were taken out of the queue, since their prefix is on its way here for others
    num_admitted: waiting requests that have got blocks
    lacking_inputs: requests with items whose encoder inputs this engine was not given; they have left their queues
    somebody_waits_for_blocks: a running request lacks blocks that are there when the steps under way are over
    chunks: bounds the tokens of prompts beside decodes; None: the token budget alone bounds them
    """

    config: SchedulerConfig
    token_budget: int
    now_s: float
    encoder: EncoderStep = field(default_factory=lambda: EncoderStep(EncoderCacheManager(0), 0))
    chunks: StepChunkBudget | None = None
    steady_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    preempted: dict[str, Victim] = field(default_factory=dict)
    lacking_inputs: list[Request] = field(default_factory=list)
    is_load_limit_reached: bool = False
    squeezing: list[SqueezingLoad] = field(default_factory=list)
    awaiting_prefix: list[Request] = field(default_factory=list)
    num_admitted: int = 0
    somebody_waits_for_blocks: bool = False
    num_prompt_tokens: int = 0
    num_prompt_logprobs: int = 0
    producer_progress: list[ProducerProgress] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is scheduled so far."""
        return not self.num_scheduled_tokens and not len(self.steady_rows)

    @property
    def may_admit(self) -> bool:
        """Whether waiting requests may join.

        Not while a running request waits for blocks: its victim would come back through its own blocks, which are
        fenced and still named in the prefix cache, take what is free for its tail, and be preempted again, for ever.
        """
        return not self.somebody_waits_for_blocks and (self.is_empty or not self.preempted)

    def has_prompts(self, rows: RunningRows) -> bool:
        """Whether a part of a prompt is scheduled."""
        requests = (rows.by_id[request_id] for request_id in self.num_scheduled_tokens)
        return any(request.num_computed_tokens < request.num_prompt_tokens for request in requests)

    def take_steady(self, rows: np.ndarray) -> None:
        """Schedule one token of each of these rows. The token budget always suffices for one token per row."""
        self.steady_rows = rows
        self.token_budget -= len(rows)

    def drop_steady(self, row: int) -> None:
        """Take a row back out, if it is in the step."""
        is_other = self.steady_rows != row
        self.token_budget += len(is_other) - int(is_other.sum())
        self.steady_rows = self.steady_rows[is_other]

    def num_new_tokens(self, request: Request, num_missing_tokens: int, queues: Queues) -> int:
        """How many tokens the request gets in this step; 0 if the request has to wait for an emptier step.

        num_missing_tokens: tokens of the request that are not computed yet, drafts not included
        """
        num_new_tokens = num_missing_tokens + len(request.spec_token_ids)
        if num_new_tokens <= 1:
            return min(num_new_tokens, self.token_budget)
        config = self.config
        if request.wants_prompt_logprobs:
            num_new_tokens = min(num_new_tokens, config.max_prompt_logprobs_per_step - self.num_prompt_logprobs)
        if request.spec_token_ids:
            # The request decodes: it gets its draft tokens only as far as the step has room, and does not wait for more
            # room.
            num_computed_tokens = request.num_tokens - num_missing_tokens
            return min(num_new_tokens, request.max_num_tokens - num_computed_tokens, self.token_budget)
        if not config.enable_chunked_prefill:
            # Only a prompt that is recomputed together with its outputs can exceed any step, and is split over several
            # steps.
            is_possible = num_new_tokens <= config.max_num_batched_tokens
            return 0 if is_possible and num_new_tokens > self.token_budget else min(num_new_tokens, self.token_budget)
        threshold = config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens and queues.others_wait(request):
            num_new_tokens = threshold
        num_new_tokens = min(num_new_tokens, self.token_budget)
        if self.chunks is None or num_new_tokens <= 0:
            return num_new_tokens
        return self.chunks.cap(request.num_tokens - num_missing_tokens, num_new_tokens)

    def take(self, request: Request, num_new_tokens: int) -> None:
        """Schedule num_new_tokens tokens of a request, drafts included."""
        if self.chunks is not None:
            self.chunks.take(request, num_new_tokens)
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        if request.wants_prompt_logprobs:
            self.num_prompt_logprobs += num_new_tokens
        if request.spec_token_ids:
            num_drafts = request.num_computed_tokens + num_new_tokens - request.num_tokens
            if num_drafts > 0:
                self.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def choose_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> EncoderInputs | None:
        """Cut a chunk before the first multimodal item that cannot be encoded now; None if it touches no item."""
        if not request.mm_features or num_new_tokens <= 0:
            return None
        chosen = self.encoder.choose(request, num_computed_tokens, num_new_tokens)
        if self.config.enable_chunked_prefill or chosen.num_new_tokens == num_new_tokens:
            return chosen
        self.encoder.give_up(request, chosen)
        return EncoderInputs([], [], num_new_tokens=0, num_embeds=0)

    def refund(self, request: Request) -> None:
        """Take a victim back out of the step, if the step has it. The victim still has its row."""
        self.drop_steady(request.row)
        self.token_budget += self.num_scheduled_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.row, None)
        self.spec_token_ids.pop(request.request_id, None)
        self.encoder.refund(request)

    def build_output(
        self,
        rows: RunningRows,
        kv_cache_manager: KVCacheManager,
        finished_req_ids: set[str],
        draft_control: DraftControl | None = None,
    ) -> SchedulerOutput:
        """Return the message to the workers, and count the step's tokens as computed."""
        others = [rows.by_id[request_id] for request_id in self.num_scheduled_tokens]
        batch = self._build_batch(rows, others)
        new: list[NewRequestData] = []
        resumed: list[ResumedRequestData] = []
        for request, num_new_tokens in zip(others, self.num_scheduled_tokens.values(), strict=True):
            if not request.is_known_to_worker:
                new.append(_describe(request, kv_cache_manager))
                request.is_known_to_worker = True
            elif request.request_id in self.resumed:
                resumed.append(_describe_resumed(request, kv_cache_manager))
            if kv_cache_manager.snapshots is not None:
                kv_cache_manager.take_snapshot(request, num_spare_blocks=len(rows))
            if request.transfer_role is TransferRole.PRODUCER:
                self._add_progress(request, num_new_tokens, kv_cache_manager)
            self._count_prompt_tokens(request, num_new_tokens)
        num_drafts_wanted = None if draft_control is None else draft_control.choose(rows, batch)
        self._advance(rows, batch, may_run_ahead=num_drafts_wanted is None)
        return SchedulerOutput(
            batch=batch,
            scheduled_new_reqs=new,
            scheduled_resumed_reqs=resumed,
            total_num_scheduled_tokens=batch.num_plain + sum(self.num_scheduled_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=set(self.preempted),
            scheduled_spec_decode_tokens=self.spec_token_ids,
            num_drafts_wanted=num_drafts_wanted,
            scheduled_encoder_inputs=self.encoder.inputs,
            structured_output_request_ids={
                request.request_id: index
                for index, request in enumerate(others, len(self.steady_rows))
                if request.sampling_params.structured_output is not None
                and request.num_computed_tokens >= request.num_tokens
            },
        )

    def _build_batch(self, rows: RunningRows, others: list[Request]) -> StepBatch:
        num_plain = len(self.steady_rows)
        indices = self.steady_rows
        if not others and not num_plain:
            return StepBatch([], NO_ROWS, NO_ROWS, 0, NO_ROWS, NO_ROWS, NO_ROWS, self._list_grown(rows))
        if others:
            indices = np.concatenate([indices, np.array([request.row for request in others], dtype=np.int64)])
        num_new_tokens = np.ones(len(indices), dtype=np.int64)
        if others:
            num_new_tokens[num_plain:] = list(self.num_scheduled_tokens.values())
        return StepBatch(
            req_ids=rows.req_ids[indices].tolist(),
            rows=indices,
            epochs=rows.epochs[indices],
            num_plain=num_plain,
            num_new_tokens=num_new_tokens,
            num_computed_tokens=rows.num_computed[indices],
            num_output_tokens=rows.num_expected[indices] - rows.num_prompt[indices],
            grown=self._list_grown(rows),
        )

    def _list_grown(self, rows: RunningRows) -> np.ndarray:
        """Each new block's row, place in the block table, and id. The worker has the blocks before these."""
        grown = [
            (row, position, block_id)
            for row, block_ids in self.new_block_ids.items()
            for position, block_id in enumerate(block_ids, rows.num_blocks_of(row) - len(block_ids))
        ]
        return np.array(grown, dtype=np.int64).T if grown else NOTHING_GROWN

    def _advance(self, rows: RunningRows, batch: StepBatch, *, may_run_ahead: bool) -> None:
        indices = batch.rows
        if not len(indices):
            return
        num_computed = batch.num_computed_tokens + batch.num_new_tokens
        rows.num_computed[indices] = num_computed
        if may_run_ahead and self.config.overlap:
            # A request whose last token is in the step gets a new one, and may go on from it before the token is known.
            gets_token = rows.runs_ahead[indices] & (num_computed == rows.num_expected[indices])
            rows.num_expected[indices] += gets_token
        rows.has_drafts[indices] = False

    def _count_prompt_tokens(self, request: Request, num_new_tokens: int) -> None:
        num_left = request.num_prompt_tokens - request.num_computed_tokens
        if num_left > 0:
            num_computed = min(num_left, num_new_tokens)
            request.num_prompt_tokens_computed += num_computed
            self.num_prompt_tokens += num_computed

    def _add_progress(self, request: Request, num_new_tokens: int, kv_cache_manager: KVCacheManager) -> None:
        self.producer_progress.append(
            ProducerProgress(
                key=TransferKey.of_handoff(request.request_id),
                block_ids=tuple(kv_cache_manager.get_handoff_ids(request)),
                num_computed_tokens_before=request.num_computed_tokens,
                num_computed_tokens_after=request.num_computed_tokens + num_new_tokens,
            )
        )


def _describe(request: Request, kv_cache_manager: KVCacheManager) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        row=request.row,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        block_ids=kv_cache_manager.get_group_ids(request.request_id),
        num_computed_tokens=request.num_computed_tokens,
        pooling_params=request.pooling_params,
        lora_name=request.lora_name,
        prompt_embeds=request.prompt_embeds,
        mm_features=request.mm_features,
        encoder_inputs=request.encoder_inputs,
    )


def _describe_resumed(request: Request, kv_cache_manager: KVCacheManager) -> ResumedRequestData:
    block_ids = kv_cache_manager.get_group_ids(request.request_id)
    return ResumedRequestData(request.request_id, request.row, request.num_tokens, block_ids)
