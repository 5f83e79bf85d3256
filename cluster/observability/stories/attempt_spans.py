"""Divides the time of one attempt of a request into phases, by what its engines have reported.

An engine's report has durations since the engine got the request. They begin where the ingress submitted the request
or, for an engine that took the request over, so that its first token is where the ingress got it. Where an engine has
sent no report, because it still works on the request or was lost, all that is known is when tokens came.
The page makes the phases of all requests, so the path of one without failures is short.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.observability.stories import phases
from cluster.observability.stories.request_story import Phase, PhaseSpan
from cluster.routing.request_record import AttemptRecord, EngineTimes

_NEVER: Final = float("inf")


class _Run(msgspec.Struct, frozen=True):
    """A time in an engine's batch, in seconds from the request's arrival. ended_s: None if it goes on"""

    began_s: float
    ended_s: float | None


class _Spans:
    """The phases of one attempt, without those that are empty."""

    __slots__ = ("_began_s", "_end_s", "_number", "found")

    def __init__(self, number: int, began_s: float, end_s: float | None) -> None:
        self._number = number
        self._began_s = began_s
        self._end_s = end_s
        self.found: list[PhaseSpan] = []

    def add(self, phase: Phase, engine_id: str, began_s: float, ended_s: float | None) -> None:
        """Add the part of a phase within the attempt, if there is any. Clocks and reports are not exact."""
        end_s = self._end_s
        if began_s < self._began_s:
            began_s = self._began_s
        if end_s is not None and (ended_s is None or ended_s > end_s):
            ended_s = end_s
        if ended_s is None or ended_s > began_s:
            self.found.append(PhaseSpan(phase, engine_id, self._number, began_s, ended_s))


def attempt_spans(attempt: AttemptRecord, number: int, end_s: float | None) -> list[PhaseSpan]:
    """Return the phases of an attempt, those of each engine in order; none of them is empty.

    number: 1 for the first attempt
    end_s:  when the attempt ended, in seconds from the request's arrival; None if it goes on
    """
    spans = _Spans(number, attempt.began_s, end_s)
    if attempt.was_left:
        spans.add(phases.QUEUE, attempt.computing_engine_id, attempt.began_s, end_s)
        return spans.found
    if attempt.prefill_engine_id is not None:
        _add_prefill_engine(spans, attempt, attempt.prefill_engine_id, end_s)
    _add_decode_engines(spans, attempt, end_s)
    return spans.found


def _add_prefill_engine(spans: _Spans, attempt: AttemptRecord, engine_id: str, end_s: float | None) -> None:
    times, began_s = attempt.prefill, attempt.began_s
    if times is None:
        # The first token came from this engine, or from the decode engine, which computed the prompt after the loss.
        known_end_s = end_s if attempt.first_token_s is None else attempt.first_token_s
        if attempt.prefill_failure and attempt.decode is not None and (runs := _runs(attempt.decode, began_s)):
            known_end_s = runs[0].began_s
        spans.add(phases.UNREPORTED, engine_id, began_s, known_end_s)
        return
    scheduled_s = began_s + times.queued_s
    spans.add(phases.QUEUE, engine_id, began_s, scheduled_s)
    spans.add(phases.PREFILL, engine_id, scheduled_s, scheduled_s + times.prefill_s)


def _add_decode_engines(spans: _Spans, attempt: AttemptRecord, end_s: float | None) -> None:
    """Add the phases at the decode engines: of those that gave the request away, only what tokens show."""
    began_s = attempt.began_s
    for engine_id, moved_s in zip(attempt.decode_engine_ids, attempt.moved_s, strict=False):
        _add_without_report(spans, attempt, engine_id, began_s, moved_s)
        began_s = moved_s
    engine_id, times = attempt.decode_engine_ids[-1], attempt.decode
    if times is None:
        _add_without_report(spans, attempt, engine_id, began_s, end_s)
    elif attempt.moved_s:
        arrived_s = attempt.moved_s[-1] - times.queued_s - times.prefill_s
        _add_alone(spans, times, engine_id, arrived_s, first_token_s=attempt.moved_s[-1])
    elif attempt.prefill_engine_id is None:
        first_token_s = began_s + times.queued_s + times.prefill_s
        _add_alone(spans, times, engine_id, began_s, first_token_s)
    else:
        _add_consumer(spans, attempt, times, engine_id)


def _add_without_report(
    spans: _Spans, attempt: AttemptRecord, engine_id: str, began_s: float, end_s: float | None
) -> None:
    first_token_s = attempt.first_token_s
    is_handoff = attempt.prefill_engine_id is not None
    # The first token of a handoff comes from the prefill engine, so it does not show that the decode engine runs.
    is_decoding = first_token_s is not None and attempt.num_new_tokens > int(is_handoff)
    if first_token_s is None or not is_decoding:
        if first_token_s is not None and attempt.prefill is not None:
            # Up to the first token the report of the prefill engine has the time, the wait for this engine included.
            began_s = max(began_s, first_token_s)
        spans.add(phases.UNREPORTED, engine_id, began_s, end_s)
        return
    decode_began_s = max(began_s, first_token_s)
    if not is_handoff:
        spans.add(phases.UNREPORTED, engine_id, began_s, decode_began_s)
    spans.add(phases.DECODE, engine_id, decode_began_s, end_s)


def _add_alone(spans: _Spans, times: EngineTimes, engine_id: str, arrived_s: float, first_token_s: float) -> None:
    """Add the phases at an engine that computes the prompt itself, or fetches what others have of it."""
    scheduled_s = arrived_s + times.queued_s
    runs = _runs(times, arrived_s) or [_Run(scheduled_s, None)]
    run_s = runs[0].began_s
    spans.add(phases.QUEUE, engine_id, arrived_s, min(run_s, scheduled_s))
    spans.add(phases.TRANSFER_EXPOSED, engine_id, scheduled_s, run_s)
    _add_running(spans, runs, engine_id, first_token_s)


def _add_consumer(spans: _Spans, attempt: AttemptRecord, times: EngineTimes, engine_id: str) -> None:
    """Add the phases at the decode engine of a handoff."""
    began_s, prefill = attempt.began_s, attempt.prefill
    reserved_s = began_s + times.queued_s
    spans.add(phases.RESERVATION, engine_id, began_s, reserved_s)
    runs = _runs(times, began_s)
    if times.num_prompt_tokens_computed and prefill is None:
        # The handoff has failed, and this engine has computed the prompt.
        waited_s = runs[0].began_s if runs else reserved_s
        spans.add(phases.UNREPORTED, engine_id, reserved_s, waited_s)
        _add_running(spans, runs, engine_id, first_token_s=attempt.first_token_s or _NEVER)
        return
    arrived_s = _arrived_s(times)
    if arrived_s is not None:
        complete_s = began_s + arrived_s
    else:
        prefilled_s = reserved_s if prefill is None else began_s + prefill.queued_s + prefill.prefill_s
        complete_s = prefilled_s + times.exposed_transfer_s
    exposed_s = complete_s - times.exposed_transfer_s
    spans.add(phases.TRANSFER_HIDDEN, engine_id, complete_s - times.transfer_s, exposed_s)
    spans.add(phases.TRANSFER_EXPOSED, engine_id, exposed_s, complete_s)
    runs = runs or [_Run(complete_s, None)]
    spans.add(phases.BATCH, engine_id, complete_s, runs[0].began_s)
    _add_running(spans, runs, engine_id, first_token_s=-_NEVER)


def _add_running(spans: _Spans, runs: list[_Run], engine_id: str, first_token_s: float) -> None:
    """Add the times in the batch, divided at the first token, and the preemptions between them."""
    preempted_s: float | None = None
    for run in runs:
        began_s, ended_s = run.began_s, run.ended_s
        if preempted_s is not None:
            spans.add(phases.PREEMPTED, engine_id, preempted_s, began_s)
        divided_s = max(began_s, first_token_s if ended_s is None else min(first_token_s, ended_s))
        spans.add(phases.PREFILL, engine_id, began_s, divided_s)
        spans.add(phases.DECODE, engine_id, divided_s, ended_s)
        preempted_s = ended_s


def _runs(times: EngineTimes, arrived_s: float) -> list[_Run]:
    """Return when the request was in the engine's batch."""
    began_s: float | None = None
    runs = []
    for one in times.statuses:
        if one.status == "RUNNING":
            began_s = arrived_s + one.at_s
        elif began_s is not None:
            runs.append(_Run(began_s, arrived_s + one.at_s))
            began_s = None
    if began_s is not None:
        runs.append(_Run(began_s, None))
    return runs


def _arrived_s(times: EngineTimes) -> float | None:
    """Return when the KV of a handoff was there, in seconds after the engine got the request; None if unknown."""
    was_waiting = False
    for one in times.statuses:
        if was_waiting:
            return one.at_s
        was_waiting = one.status == "WAITING_FOR_REMOTE_KVS"
    return None
