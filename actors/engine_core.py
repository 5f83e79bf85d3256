"""EngineCore: schedules, executes and takes in steps. `step()` is the whole engine.

Requests and aborts come in from any thread through an inbox; everything else happens in the one thread that calls
`step()`. The inbox is emptied before the step is scheduled and once more before its results are taken in, so that a
request which was aborted while the step ran gets none of its tokens.

With overlap a step is scheduled while the one before it still runs, so that the device never waits for the scheduler.
The scheduler then lacks only the tokens that are being sampled, which it does not need. For a request that ends with
one of these tokens the next step computes one token too many, which is dropped.

The durations of steps are fitted (actors/costs), since routing needs to know what a step would take. A step's duration
begins when it is started, or when the step before it ends if that is later.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.outputs.step_stats import StepStats
from actors.core.requests.adapter import Adapter
from actors.core.requests.block_hash import BlockHasher, BlockHashKey
from actors.core.requests.request import EngineCoreRequest, FinishReason, Request, RequestStatus
from actors.core.scheduler import Scheduler
from actors.costs.engine_costs import EngineCosts
from actors.costs.step_shape import StepShape
from actors.errors import DuplicateRequest
from actors.executor import Executor, RunningStep

_MAX_COUNTED_CLIENTS: Final = 1024
"""The most clients whose requests are counted. Each session is a client, so old ones are over."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of a step, by client index. After an idle step no step is due until something comes in."""

    outputs: dict[int, EngineCoreOutputs]
    is_idle: bool


@dataclass(frozen=True, slots=True)
class _StartedStep:
    output: SchedulerOutput
    running: RunningStep
    started_s: float


@dataclass(frozen=True, slots=True)
class _Submission:
    client_index: int
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    client_index: int
    request_id: str
    attempt: int | None


@dataclass(frozen=True, slots=True)
class _Preload:
    adapter: Adapter
    on_done: Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class _Question:
    function: Callable[[], object]
    answer: Future[object]


class EngineCore:
    """A scheduler, and the executor that carries out its steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        hash_key: BlockHashKey,
        costs: EngineCosts | None = None,
    ) -> None:
        """Run no step yet.

        hash_key: key of the block hashes, the same in all engines that exchange KV
        costs:    takes the durations of the steps
        """
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._hasher = BlockHasher(scheduler.block_size, hash_key)
        self._max_steps_ahead = int(scheduler.overlaps)
        self._under_way: deque[_StartedStep] = deque()
        self._step_costs = costs or EngineCosts()
        self._step_stats = StepStats()
        self._last_end_s, self._was_idle = -math.inf, True
        self._num_replayed_steps = 0
        self._inbox: deque[_Submission | _Abort | _Preload | _Question] = deque()
        self._refused: list[tuple[int, EngineCoreOutput]] = []
        self._num_taken: OrderedDict[int, int] = OrderedDict()
        self.num_taken_from_all = 0
        """How many requests of all clients were taken out of the inbox."""

    def submit(self, request: EngineCoreRequest, client_index: int = 0) -> None:
        """Queue a request; from any thread. A refusal comes back as the request's output."""
        self._inbox.append(_Submission(client_index, request))

    def abort(self, request_id: str, client_index: int = 0, attempt: int | None = None) -> None:
        """Queue the end of a client's own request; from any thread. Unknown and finished ones are ignored."""
        self._inbox.append(_Abort(client_index, request_id, attempt))

    def preload(self, adapter: Adapter, on_done: Callable[[str | None], None]) -> None:
        """Queue the loading of an adapter; from any thread.

        on_done: called on the thread that steps, with None or with why the load failed
        """
        self._inbox.append(_Preload(adapter, on_done))

    def ask(self, function: Callable[[], object]) -> Future[object]:
        """Queue a call, which the thread that steps makes before or after a step's execution; from any thread."""
        question = _Question(function, Future())
        self._inbox.append(question)
        return question.answer

    def step(self) -> StepResult:
        """Schedule a step, execute it, and take in its results; with overlap, the results of the step before it."""
        self._empty_inbox()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output.structured_output_request_ids:
            self._fill_bitmask(scheduler_output)
        if not (scheduler_output.is_empty() and self._under_way):
            started_s = self._clock()
            self._under_way.append(_StartedStep(scheduler_output, self.executor.start(scheduler_output), started_s))
        if scheduler_output.total_num_scheduled_tokens and len(self._under_way) <= self._max_steps_ahead:
            return StepResult(self._with_refusals({}), is_idle=False)
        return self._finish_step(is_news=not scheduler_output.is_empty())

    def _fill_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """Mask the tokens that grammars forbid. Requests with a grammar never run ahead, so their output is known."""
        grammars = self.scheduler.structured_output
        assert grammars is not None, "an engine without a grammar compiler refuses requests with a grammar"
        scheduler_output.grammar_bitmask = grammars.fill_bitmask(
            scheduler_output.structured_output_request_ids, scheduler_output.scheduled_spec_decode_tokens
        )

    def _finish_step(self, *, is_news: bool) -> StepResult:
        """Wait for the oldest step and take it in. is_news: something was scheduled just now."""
        started = self._under_way.popleft()
        scheduler_output, model_output = started.output, started.running.result()
        self._note_duration(started)
        self._num_replayed_steps += model_output.is_replayed
        self._empty_inbox()
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        transfers = model_output.kv_connector_output
        has_moved = is_news or bool(outputs) or not (transfers is None or transfers.is_empty())
        has_moved |= bool(model_output.adapter_loads)
        self._was_idle = not (has_moved or self._under_way or self._has_work_pending())
        return StepResult(self._with_refusals(outputs), self._was_idle)

    def _note_duration(self, started: _StartedStep) -> None:
        """Count a step that has ended: from the end of the step before it, unless the engine was idle in between.

        What is done between two steps lengthens the time between tokens, too.
        """
        ended_s, began_s = self._clock(), self._last_end_s
        if self._was_idle:
            began_s = max(started.started_s, began_s)
        self._last_end_s = ended_s
        output = started.output
        if output.total_num_scheduled_tokens:
            self._step_stats.add(ended_s - began_s, output.total_num_scheduled_tokens)
        # Images and adapters take time of their own, which is no part of the model's steps.
        if output.total_num_scheduled_tokens and not (output.scheduled_encoder_inputs or output.adapter_commands):
            self._step_costs.observe(_shape_of(output), ended_s - began_s)

    def seconds_to_next_deadline(self) -> float | None:
        """Return how long an idle engine may sleep; None if until something comes in."""
        deadline_s = self.scheduler.next_deadline()
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the scheduler's counters; only from the engine thread.

        From here on the scheduler predicts steps with the newest cost model.
        """
        model = self._step_costs.model()
        self.scheduler.chunk_budget.use_model(model)
        stats = self.scheduler.make_stats()
        if self._under_way and stats.load_report is not None and model.is_sure:
            # What is scheduled counts as computed in the report.
            left_s = sum(max(model.seconds(_shape_of(one.output)), 0.0) for one in self._under_way)
            left_s = max(left_s - (self._clock() - self._under_way[0].started_s), 0.0)
            stats = replace(stats, load_report=replace(stats.load_report, describes_in_s=left_s))
        return replace(
            stats,
            step_costs=model,
            step_stats=self._step_stats.snapshot(),
            num_replayed_steps=self._num_replayed_steps,
        )

    def count_taken(self, client_index: int) -> None:
        """Count a request that a client has sent as taken in; only from the engine thread.

        Submitted ones are counted here. Others, which ended before they could be submitted, have to be as well: clients
        know by this number which of their requests a report has.
        """
        self.num_taken_from_all += 1
        self._num_taken[client_index] = self._num_taken.get(client_index, 0) + 1
        if len(self._num_taken) > _MAX_COUNTED_CLIENTS:
            self._num_taken.popitem(last=False)

    def num_taken_by_client(self) -> dict[int, int]:
        """Return how many requests of each client were taken out of the inbox; only from the engine thread."""
        return dict(self._num_taken)

    def shutdown(self) -> None:
        """Release the executor's memory, links and threads, and save the step cost model."""
        self._step_costs.close()
        self.scheduler.shutdown()
        if self.scheduler.structured_output is not None:
            self.scheduler.structured_output.shutdown()
        self.executor.shutdown()

    def _has_work_pending(self) -> bool:
        return bool(self._inbox) or self.scheduler.has_finished_requests()

    def _empty_inbox(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, _Submission):
                self._add(command)
            elif isinstance(command, _Preload):
                self.scheduler.preparation.preload(command.adapter, command.on_done)
            elif isinstance(command, _Question):
                _answer(command)
            else:
                self._finish(command)

    def _add(self, submission: _Submission) -> None:
        self.count_taken(submission.client_index)
        request = Request.from_engine_core_request(
            submission.request, submission.client_index, self._hasher, now_s=self._clock()
        )
        try:
            self.scheduler.add_request(request)
        except DuplicateRequest as error:
            refusal = EngineCoreOutput(
                request_id=request.request_id,
                attempt=request.attempt,
                new_token_ids=[],
                first_position=request.num_output_tokens,
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
            self._refused.append((submission.client_index, refusal))

    def _finish(self, abort: _Abort) -> None:
        request = self.scheduler.requests.get(abort.request_id)
        if request is None or request.client_index != abort.client_index:
            return
        if abort.attempt is None or request.attempt == abort.attempt:
            self.scheduler.finish_requests(abort.request_id, RequestStatus.FINISHED_ABORTED)

    def _with_refusals(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        for client_index, refusal in self._refused:
            outputs.setdefault(client_index, EngineCoreOutputs()).others.append(refusal)
        self._refused = []
        return outputs


def _answer(question: _Question) -> None:
    if not question.answer.set_running_or_notify_cancel():
        return  # The caller has cancelled its question.
    try:
        question.answer.set_result(question.function())
    except Exception as error:
        question.answer.set_exception(error)


def _shape_of(output: SchedulerOutput) -> StepShape:
    batch, drafts = output.batch, output.scheduled_spec_decode_tokens
    return StepShape.of_batch(
        batch.num_new_tokens, batch.num_computed_tokens, max(map(len, drafts.values()), default=0)
    )
