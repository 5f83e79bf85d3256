"""The scheduler decides how many tokens each request computes in the next step, and takes in the results of steps.

There is no prefill phase and no decode phase: in each step num_computed_tokens of some requests catches up with their
tokens, within the step's token budget. RUNNING requests come first, then waiting ones.

An unfinished request is in exactly one place: running, waiting or loaded (scheduler_queues.py), or waiting for its peer
(remote_kv.py). steps/running_scheduler.py gives the running ones their tokens, steps/preemption.py chooses who loses
its blocks, steps/waiting_scheduler.py chooses who joins them, and steps/step_update.py takes in what a step has
computed. These parts return the requests that have to end; only the scheduler ends them.

One thread makes all calls. A step may be scheduled while earlier ones are still under way; their results are taken in
in the order of the steps. Requests may be added and finished in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace

from actors.config import CacheConfig, SchedulerConfig
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.blocks.kv_events import KVEventBatch, KVEventLog
from actors.core.drafts.draft_control import make_draft_control, take_drafts
from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.encoder.encoder_scheduling import EncoderStep
from actors.core.feasibility import find_refusal
from actors.core.integrity import check_queues
from actors.core.loads.handoff_rank import HandoffRank
from actors.core.loads.remote_kv import RemoteKV
from actors.core.loads.transfer_parts import NO_TRANSFERS, TransferParts
from actors.core.outputs.ending import Ending
from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutputs
from actors.core.outputs.load_report import LoadMeter
from actors.core.outputs.model_runner_output import DraftTokenIds, ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.preparation import Preparation
from actors.core.queue.adapter_cache import AdapterCache
from actors.core.queue.fair_queue import create_request_queue
from actors.core.queue.grammar_wait import GrammarWait
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.queue.request_queue import RequestQueue
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.abilities import Ability, engine_abilities
from actors.core.requests.request import Request, RequestStatus
from actors.core.requests.running_rows import RunningRows
from actors.core.requests.stop import find_stop
from actors.core.requests.structured_output import StructuredOutputManager
from actors.core.steps.chunk_budget import ChunkBudget
from actors.core.steps.client_outputs import ClientOutputs
from actors.core.steps.preemption import Preemptor
from actors.core.steps.running_scheduler import RunningScheduler
from actors.core.steps.step import Step
from actors.core.steps.step_update import StepUpdate
from actors.core.steps.waiting_scheduler import WaitingScheduler
from actors.errors import DuplicateRequest, IntegrityError
from kv_transfer.message_ranges import MAX_COUNT
from kv_transfer.params import TransferRole


class Scheduler:
    """Takes requests, decides steps, and returns the outputs of each client.

    worker_abilities: abilities of the worker; a request that needs another one is refused
    num_state_blocks: how many blocks a request's recurrent state takes, beside those of its tokens
    clock: monotonic, in seconds
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        *,
        structured_output: StructuredOutputManager | None = None,
        worker_abilities: Iterable[Ability] = frozenset(Ability),
        adapters: AdapterCache | None = None,
        transfers: TransferParts = NO_TRANSFERS,
        vocab_size: int = MAX_COUNT,
        num_state_blocks: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self.config = scheduler_config
        self.block_size = cache_config.block_size
        self.max_model_len = max_model_len
        self.structured_output = structured_output
        self._clock = clock
        self._abilities = engine_abilities(worker_abilities, transfers.connector, structured_output)
        self.kv_events = KVEventLog() if cache_config.has_kv_events else None
        self.kv_cache_manager = kv = KVCacheManager.configured(
            cache_config, num_blocks, num_state_blocks, self.kv_events, transfers.stores
        )
        self.encoder_cache_manager = EncoderCacheManager(scheduler_config.encoder_cache_size)
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self._queues = queues = Queues.create(scheduler_config, cache_config)
        self._client_outputs = outputs = ClientOutputs()
        self.stats = SchedulerStats.first(num_blocks, self.block_size, scheduler_config.speculative)
        self._load_meter = LoadMeter(
            scheduler_config, kv.block_pool, cache_config.block_size, transfers.kv_bytes_per_token, num_state_blocks
        )
        self._draft_control = make_draft_control(scheduler_config)
        self._deadlines: RemovableHeap[tuple[float]] = RemovableHeap()
        self._common_prefix = (0, 0)
        self._preempted_by_reset: set[str] = set()
        self.remote = RemoteKV(
            transfers,
            kv,
            blocked_consumers=create_request_queue(scheduler_config),
            structured_output=structured_output,
            vocab_size=vocab_size,
            num_lookahead_tokens=scheduler_config.num_lookahead_tokens,
        )
        self._handoff_rank = HandoffRank(self.requests, self.remote.held)
        grammars = GrammarWait(structured_output, scheduler_config.grammar_timeout_s)
        self.preparation = Preparation(grammars, adapters, queues.waiting)
        self._preemptor = Preemptor(scheduler_config, kv, queues, outputs)
        self._running_scheduler = RunningScheduler(scheduler_config, kv, queues, self._preemptor)
        self._waiting_scheduler = WaitingScheduler(scheduler_config, kv, queues, self.remote)
        self.chunk_budget = ChunkBudget(scheduler_config, queues)
        self._step_update = StepUpdate(
            queues.running, kv, self.encoder_cache_manager, outputs, self.stats, structured_output, self._draft_control
        )

    # -- requests come and go ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take a request in. A request that can never fit, or is complete already, ends at once, with an output.

        Raises DuplicateRequest if its id belongs to an unfinished request, or to one whose blocks a transfer holds.
        """
        if request.request_id in self.requests or request.request_id in self.remote.held:
            raise DuplicateRequest(f"request {request.request_id} is still in this engine")
        if request.pooling_params is None:
            request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        objection = self._handoff_rank.find_objection(request)
        if objection is not None and request.transfer_role is TransferRole.CONSUMER:
            # This objection is to the handoff and not to the request, so this engine computes all of the request
            # itself.
            request.transfer_role = request.kv_transfer_params = objection = None
        self.requests[request.request_id] = request
        self.remote.add_request(request)
        now_s = self._clock()
        if objection is not None:
            self._end(Ending(request, RequestStatus.FINISHED_ERROR, f"handoff refused: {objection}"), now_s)
        elif request.num_output_tokens and (stop := find_stop(request)) is not None:
            self._end(Ending(request, stop), now_s)
        elif (refusal := self._find_refusal(request)) is not None:
            self._end(Ending(request, RequestStatus.FINISHED_IGNORED, refusal), now_s)
        else:
            if request.deadline_s is not None:
                self._deadlines.push(request.request_id, (request.deadline_s,))
            if self.preparation.start(request, now_s):
                self.waiting.assign_position(request)
            else:
                self.waiting.add_request(request)

    def _find_refusal(self, request: Request) -> str | None:
        return find_refusal(request, self.config, self._abilities, self.kv_cache_manager, self.max_model_len)

    def finish_requests(
        self, request_ids: str | Iterable[str], finished_status: RequestStatus, error: str | None = None
    ) -> None:
        """End requests from outside. Unknown and finished ones are ignored.

        error: why the engine itself ends them, for their outputs; None if the client aborted them, and gets no output
        """
        if not finished_status.is_finished:
            raise ValueError(f"{finished_status.name} does not end a request")
        now_s = self._clock()
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if (request := self.requests.get(request_id)) is not None:
                self._end(Ending(request, finished_status, error, is_silent=error is None), now_s)

    def _end(self, ending: Ending, now_s: float) -> None:
        """End a request in any queue. Its blocks are free afterwards, or held until its transfer is over."""
        request = ending.request
        request.set_status(ending.status, now_s)
        request_id = request.request_id
        del self.requests[request_id]
        self._queues.remove(request)
        self.encoder_cache_manager.free(request)
        self._deadlines.remove(request_id)
        self.preparation.release(request)
        self.remote.release(request, ending.producer_end, ending.first_token_id)
        self.finished_req_ids.add(request_id)
        self._client_outputs.add_finished_id(request)
        if not ending.is_silent:
            self._client_outputs.add_end(ending, now_s)

    # -- a step is put together ----------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        If it is empty, and update_from_output then has no outputs, nothing can be done before something happens: a
        request is added, the connector reports, a step under way ends, or next_deadline() passes.
        """
        now_s = self._clock()
        self._end_overdue_requests(now_s)
        for ending in self.preparation.proceed(now_s):
            self._end(ending, now_s)
        self.remote.proceed(self._queues, now_s)
        step = self._begin_step(self.config.max_num_batched_tokens, now_s)
        self._running_scheduler.schedule_running(step)
        self._waiting_scheduler.schedule_waiting(step)
        for request in step.lacking_inputs:
            # The client submits the request anew, with the inputs of its images.
            error = "it would have to compute its images anew, which it was not given"
            self._end(Ending(request, RequestStatus.FINISHED_ERROR, error, EndCause.INPUTS_MISSING), now_s)
        return self._build_output(step)

    def _begin_step(self, token_budget: int, now_s: float) -> Step:
        encoder = EncoderStep(self.encoder_cache_manager, self.config.max_num_encoder_input_tokens)
        return Step(self.config, token_budget, now_s, encoder, self.chunk_budget.begin_step(now_s))

    def _end_overdue_requests(self, now_s: float) -> None:
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now_s:
            self.finish_requests(first[1], RequestStatus.FINISHED_ABORTED, error="deadline exceeded")

    def _build_output(self, step: Step) -> SchedulerOutput:
        finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        output = step.build_output(self.running, self.kv_cache_manager, finished_req_ids, self._draft_control)
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        output.adapter_commands = self.preparation.take_commands()
        output.preempted_req_ids |= self._preempted_by_reset
        self._preempted_by_reset = set()
        output.num_common_prefix_blocks = [self._count_common_prefix_blocks()]
        self.stats.num_prompt_tokens_computed += step.num_prompt_tokens
        if output.total_num_scheduled_tokens:
            self.stats.num_steps += 1
            output.step_index = self.stats.num_steps
            output.block_copies = self.kv_cache_manager.begin_step(output.step_index)
        output.kv_connector_metadata = self.remote.build_metadata(
            step.producer_progress, output.total_num_scheduled_tokens, step.now_s
        )
        return output

    def _count_common_prefix_blocks(self) -> int:
        """Return the number, counted anew only when the running requests change: requests grow at their ends only."""
        if self._common_prefix[0] != (changes := self.running.num_changes):
            self._common_prefix = (changes, self.kv_cache_manager.get_num_common_prefix_blocks(self.running))
        return self._common_prefix[1]

    # -- a step is taken in --------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the sampled tokens, end complete requests, and return the new outputs by client index.

        Steps come back in the order in which they were scheduled. A request that ended, or was preempted, since the
        step was scheduled gets no token from the step.
        """
        now_s = self._clock()
        if scheduler_output.step_index:
            self.kv_cache_manager.end_step(scheduler_output.step_index)
        self.preparation.take_in(model_runner_output.adapter_loads)
        # This comes before the tokens: a producer must not hand a request over to a consumer that is gone.
        self._update_from_connector(model_runner_output, now_s)
        for request_id in model_runner_output.num_nans_in_logits:
            self._count_corrupted(request_id)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for ending in self._step_update.take_in(scheduler_output.batch, drafts, model_runner_output, now_s):
            self._end(ending, now_s)
        if model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        return self._client_outputs.take()

    def _update_from_connector(self, model_runner_output: ModelRunnerOutput, now_s: float) -> None:
        output = model_runner_output.kv_connector_output
        if output is None:
            return
        for ending in self.remote.update(output, self.requests, self._queues, now_s):
            self._end(ending, now_s)

    def _count_corrupted(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and not request.is_corrupted:
            request.is_corrupted = True
            self.stats.num_corrupted_reqs += 1

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in a drafter's tokens for running requests; the next step verifies those of requests that decode."""
        take_drafts(draft_token_ids, self.running, self.structured_output)

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        """Whether a step may be scheduled while another one runs."""
        return bool(self.config.overlap)

    @property
    def running(self) -> RunningRows:
        """RUNNING requests, in the order of admission."""
        return self._queues.running

    @property
    def waiting(self) -> RequestQueue:
        """Requests that wait for their turn without blocks."""
        return self._queues.waiting

    @property
    def loaded(self) -> RequestQueue:
        """Requests that wait for their turn with blocks."""
        return self._queues.loaded

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, all other unfinished) requests."""
        return len(self.running), len(self.requests) - len(self.running)

    def has_finished_requests(self) -> bool:
        """Whether the worker has yet to be told, by the next step, of requests that ended."""
        return bool(self.finished_req_ids)

    def has_requests(self) -> bool:
        """Whether a request is unfinished, or its end unreported, or blocks are held by a transfer or by a step."""
        num_fenced_blocks = self.kv_cache_manager.num_fenced_blocks
        return bool(self.requests or self.finished_req_ids or self.remote.has_transfers or num_fenced_blocks)

    def next_deadline(self) -> float | None:
        """Return the time at which schedule() has something to end or cancel, or None."""
        own = self._deadlines.peek()
        deadlines = (own and own[0][0], self.preparation.next_deadline(), self.remote.next_deadline())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the counters. The mark of a prefix cache reset is in one snapshot only."""
        pool, prefix = self.kv_cache_manager.block_pool, self.kv_cache_manager.prefix_cache_stats
        num_loading = len(self.remote.loading)
        snapshot = replace(
            self.stats,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.requests) - len(self.running) - num_loading,
            num_waiting_for_remote_kvs=num_loading,
            num_waiting_by_reason=self.remote.waits() | self.preparation.waits() | self._queues.waits(),
            num_held_reqs=len(self.remote.held),
            num_refused_handoffs=self._handoff_rank.num_refused,
            num_free_blocks=pool.num_free_blocks,
            kv_cache_usage=self.kv_cache_manager.usage,
            num_preemptions=self._preemptor.num_preemptions,
            num_late_completions=self.remote.num_late_completions,
            prefix_cache_stats=replace(prefix),
            spec_decoding_stats=deepcopy(self.stats.spec_decoding_stats),
            transfer_stats=self.remote.transfer_stats,
            store_stats=self.remote.store_stats,
            adapter_stats=self.preparation.adapter_stats(),
            grammar_stats=self.preparation.grammar_stats(),
            embedding_stats=replace(self.remote.embeddings.stats),
            load_report=self._load_meter.report(
                self.requests,
                self.remote,
                self.running,
                prefix,
                mixed_step_bound_s=self.chunk_budget.bound_s,
                late_after_s=self.chunk_budget.late_after_s,
                now_s=self._clock(),
            ),
        )
        prefix.reset = False
        return snapshot

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, for instance after new weights. Refuses, and returns False, while any is held.

        reset_running_requests: preempt all running requests first; they start over. The reset fails, and preempts no
        request, while a transfer holds blocks, a waiting request has blocks that a transfer has filled, or a running
        request sends its blocks to a consumer.
        """
        rows = self._queues.running
        is_transferring = bool(self.remote.loading or self.remote.has_transfers or self._queues.all_loaded())
        if reset_running_requests and not is_transferring and not rows.is_producer.any():
            step = self._begin_step(0, self._clock())
            for request in list(rows.last_admitted()):
                self._preemptor.preempt(request, step)
            self._preempted_by_reset |= step.preempted.keys()
        return self.kv_cache_manager.reset_prefix_cache()

    def take_kv_events(self) -> KVEventBatch | None:
        """Return the prefix cache's events since the last call; None if there are none, or events are not enabled."""
        return None if self.kv_events is None else self.kv_events.take()

    def shutdown(self) -> None:
        """End every request; the next update_from_output tells their clients."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED, error="the engine shuts down")

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks, queues and statuses contradict each other. Costs O(blocks + requests)."""
        self.kv_cache_manager.check_integrity()
        self.encoder_cache_manager.check_integrity()
        self.preparation.check_integrity()
        check_queues(self.requests, self._queues, self.remote, self.preparation, self.kv_cache_manager)
        if not self.encoder_cache_manager.holders() <= self.running.by_id.keys():
            raise IntegrityError("a request that does not run holds encoder outputs")
