"""A scheduler that writes down what it is told and what it decides; the decisions are those of any scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import EngineCoreRequest, Request, RequestStatus
from actors.core.scheduler import Scheduler
from actors.errors import DuplicateRequest, EngineError
from actors.recording.decision_digest import outputs_digest, step_digest
from actors.recording.engine_events import (
    CODEC,
    Added,
    Aimed,
    Ended,
    EngineEvent,
    EngineHeader,
    Reset,
    Scheduled,
    StepResults,
    TakenIn,
    Unrecorded,
)
from actors.recording.read_clock import ReadClock
from actors.recording.recording_file import RecordingFile

_MAX_PENDING: int = 64
"""More steps are never under way; an output that was not taken in is forgotten then."""


class RecordedScheduler(Scheduler):
    """A Scheduler with a recording, which begins with record().

    Invariant: what the scheduler calls itself (it ends requests past their deadline) is part of the call that is
    recorded, and has no record of its own.
    """

    _file: RecordingFile | None = None
    _clock_read: ReadClock
    _aim: Aimed | None
    _pending: deque[tuple[SchedulerOutput, int]]
    _num_scheduled: int

    def record(self, file: RecordingFile, header: EngineHeader, clock: ReadClock) -> None:
        """Begin to record, before the first call. clock: the one that this scheduler reads"""
        self._file, self._clock_read = file, clock
        self._aim, self._pending, self._num_scheduled = None, deque(maxlen=_MAX_PENDING), 0
        self._note(header)

    @property
    def is_recorded(self) -> bool:
        """Whether the recording goes on."""
        return self._file is not None and self._file.is_open

    def add_request(self, request: Request) -> None:
        """Take a request in; see Scheduler."""
        if not self.is_recorded:
            super().add_request(request)
            return
        if (reason := _why_not(request)) is not None:
            self._note(Unrecorded(f"request {request.request_id} has {reason}"))
            self._close()
            super().add_request(request)
            return
        told, arrived_s = _told(request), request.status_changes[0].at_s
        self._clock_read.begin()
        is_duplicate = False
        try:
            super().add_request(request)
        except DuplicateRequest:
            is_duplicate = True
            raise
        finally:
            self._note(Added(told, request.client_index, arrived_s, is_duplicate, self._clock_read.end()))

    def finish_requests(
        self, request_ids: str | Iterable[str], finished_status: RequestStatus, error: str | None = None
    ) -> None:
        """End requests from outside; see Scheduler."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._recorded_call() as is_recorded:
            super().finish_requests(ids, finished_status, error)
            if is_recorded:
                self._note(Ended(ids, finished_status.name, error, self._clock_read.end()))

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; see Scheduler."""
        if self.is_recorded:
            self._note_aim()
        with self._recorded_call() as is_recorded:
            output = super().schedule()
            if is_recorded:
                self._pending.append((output, self._num_scheduled))
                self._num_scheduled += 1
                num_tokens = output.total_num_scheduled_tokens
                digest = step_digest(output)
                self._note(Scheduled(len(output.batch), num_tokens, digest, self._clock_read.end()))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's results in; see Scheduler."""
        if not self.is_recorded:
            return super().update_from_output(scheduler_output, model_runner_output)
        number, results = self._number_of(scheduler_output), _results(model_runner_output)
        self._clock_read.begin()
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        except EngineError as error:
            self._note(TakenIn(number, results, (), str(error), self._clock_read.end()))
            self._close()
            raise
        self._note(TakenIn(number, results, outputs_digest(outputs), None, self._clock_read.end()))
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; see Scheduler."""
        with self._recorded_call() as is_recorded:
            is_done = super().reset_prefix_cache(reset_running_requests)
            if is_recorded:
                self._note(Reset(reset_running_requests, is_done, self._clock_read.end()))
        return is_done

    def shutdown(self) -> None:
        """End every request, and the recording."""
        super().shutdown()
        self._close()

    @contextmanager
    def _recorded_call(self) -> Iterator[bool]:
        """Let the clock's readings be kept; yields False within another call, or if nothing is recorded."""
        is_recorded = self.is_recorded and self._clock_read.begin()
        try:
            yield is_recorded
        finally:
            if is_recorded:
                self._clock_read.end()

    def _note_aim(self) -> None:
        """Note what chunks go by, if that has changed since the last step."""
        itl_s, ttft_s, role, model = self.chunk_budget.inputs
        aimed, known = Aimed(itl_s, role, model, ttft_s), self._aim
        # Models are compared as objects: comparing all of their numbers in each step would cost more than the note.
        if known is None or model is not known.model or aimed != known:
            self._aim = aimed
            self._note(aimed)

    def _number_of(self, output: SchedulerOutput) -> int:
        while True:
            pending, number = self._pending.popleft()
            if pending is output:
                return number

    def _note(self, event: EngineEvent) -> None:
        assert self._file is not None, "record() comes first"
        self._file.write(CODEC.encode(event))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _why_not(request: Request) -> str | None:
    """Return what of a request depends on more than the scheduler is told by calls; None if nothing does."""
    if request.sampling_params.structured_output is not None:
        return "a grammar, which is compiled beside the scheduler"
    if request.lora is not None:
        return "an adapter, which is loaded beside the scheduler"
    return "images, which are encoded beside the scheduler" if request.mm_features else None


def _told(request: Request) -> EngineCoreRequest:
    """Return the message from which a request was made, as far as a scheduler reads it."""
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        attempt=request.attempt,
        output_token_ids=request.output_token_ids,
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        arrival_time_s=request.arrival_time,
        deadline_s=request.deadline_s,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        prompt_embeds=request.prompt_embeds,
        pooling_params=request.pooling_params,
        kv_transfer_params=request.kv_transfer_params,
        prefix_source=request.prefix_source,
        traceparent=request.traceparent,
    )


def _results(output: ModelRunnerOutput) -> StepResults:
    transfers = output.kv_connector_output
    if transfers is not None:
        # The list goes on to the scheduler, which does not change it; counters decide nothing.
        transfers = None if transfers.is_empty() else replace(transfers, stats=None, store_stats=None)
    return StepResults(
        output.req_ids,
        output.token_ids,
        list(output.pooler_output),
        dict(output.num_nans_in_logits),
        output.draft_token_ids,
        transfers,
    )
