"""Divides the time of one attempt of a request into phases, by what its engines have reported.

An engine's report has durations since the engine got the request. They begin where the ingress submitted the request
or, for an engine that took the request over, so that its first token is where the ingress got it. Where an engine has
sent no report, because it still works on the request or was lost, all that is known is when tokens came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import msgspec

from cluster.observability.stories.request_story import Phase, PhaseSpan
from cluster.routing.request_record import AttemptRecord, EngineTimes, StatusAt

_NEVER: Final = float("inf")


class _Run(msgspec.Struct, frozen=True):
    """A time in an engine's batch, in seconds from the request's arrival. ended_s: None if it goes on"""

    began_s: float
    ended_s: float | None


def attempt_spans(attempt: AttemptRecord, number: int, end_s: float | None) -> list[PhaseSpan]:
    """Return the phases of an attempt, those of each engine in order; none of them is empty.

    number: 1 for the first attempt
    end_s:  when the attempt ended, in seconds from the request's arrival; None if it goes on
    """
    spans = [*_prefill_engine(attempt, number, end_s), *_decode_engines(attempt, number, end_s)]
    clipped = (_clip(span, attempt.began_s, end_s) for span in spans)
    return [span for span in clipped if span is not None]


def _prefill_engine(attempt: AttemptRecord, number: int, end_s: float | None) -> Iterator[PhaseSpan]:
    engine_id, times, began_s = attempt.prefill_engine_id, attempt.prefill, attempt.began_s
    if engine_id is None:
        return
    if times is None:
        # The first token came from this engine, or from the decode engine, which computed the prompt after the loss.
        known_end_s = end_s if attempt.first_token_s is None else attempt.first_token_s
        if attempt.prefill_failure and attempt.decode is not None and (runs := _runs(attempt.decode, began_s)):
            known_end_s = runs[0].began_s
        yield PhaseSpan(Phase.UNREPORTED, engine_id, number, began_s, known_end_s)
        return
    scheduled_s = began_s + times.queued_s
    yield PhaseSpan(Phase.QUEUE, engine_id, number, began_s, scheduled_s)
    yield PhaseSpan(Phase.PREFILL, engine_id, number, scheduled_s, scheduled_s + times.prefill_s)


def _decode_engines(attempt: AttemptRecord, number: int, end_s: float | None) -> Iterator[PhaseSpan]:
    """Yield the phases at the decode engines: of those that gave the request away, only what tokens show."""
    began_s = attempt.began_s
    for engine_id, moved_s in zip(attempt.decode_engine_ids, attempt.moved_s, strict=False):
        yield from _without_report(attempt, engine_id, number, began_s, moved_s)
        began_s = moved_s
    engine_id, times = attempt.decode_engine_ids[-1], attempt.decode
    if times is None:
        yield from _without_report(attempt, engine_id, number, began_s, end_s)
    elif attempt.moved_s:
        arrived_s = attempt.moved_s[-1] - times.queued_s - times.prefill_s
        yield from _alone(times, engine_id, number, arrived_s, first_token_s=attempt.moved_s[-1])
    elif attempt.prefill_engine_id is None:
        first_token_s = began_s + times.queued_s + times.prefill_s
        yield from _alone(times, engine_id, number, began_s, first_token_s)
    else:
        yield from _consumer(attempt, times, engine_id, number)


def _without_report(
    attempt: AttemptRecord, engine_id: str, number: int, began_s: float, end_s: float | None
) -> Iterator[PhaseSpan]:
    first_token_s = attempt.first_token_s
    is_handoff = attempt.prefill_engine_id is not None
    # The first token of a handoff comes from the prefill engine, so it does not show that the decode engine runs.
    is_decoding = first_token_s is not None and attempt.num_new_tokens > int(is_handoff)
    if first_token_s is None or not is_decoding:
        yield PhaseSpan(Phase.UNREPORTED, engine_id, number, began_s, end_s)
        return
    decode_began_s = max(began_s, first_token_s)
    if not is_handoff:
        yield PhaseSpan(Phase.UNREPORTED, engine_id, number, began_s, decode_began_s)
    yield PhaseSpan(Phase.DECODE, engine_id, number, decode_began_s, end_s)


def _alone(
    times: EngineTimes, engine_id: str, number: int, arrived_s: float, first_token_s: float
) -> Iterator[PhaseSpan]:
    """Yield the phases at an engine that computes the prompt itself, or fetches what others have of it."""
    scheduled_s = arrived_s + times.queued_s
    runs = _runs(times, arrived_s) or [_Run(scheduled_s, None)]
    yield PhaseSpan(Phase.QUEUE, engine_id, number, arrived_s, min(scheduled_s, runs[0].began_s))
    yield PhaseSpan(Phase.TRANSFER_EXPOSED, engine_id, number, scheduled_s, runs[0].began_s)
    yield from _running(runs, engine_id, number, first_token_s)


def _consumer(attempt: AttemptRecord, times: EngineTimes, engine_id: str, number: int) -> Iterator[PhaseSpan]:
    """Yield the phases at the decode engine of a handoff."""
    began_s = attempt.began_s
    reserved_s = began_s + times.queued_s
    yield PhaseSpan(Phase.RESERVATION, engine_id, number, began_s, reserved_s)
    arrived = [one.at_s for before, one in _pairs(times) if before == "WAITING_FOR_REMOTE_KVS"]
    runs = _runs(times, began_s)
    if times.num_prompt_tokens_computed and attempt.prefill is None:
        # The handoff has failed, and this engine has computed the prompt.
        waited_s = runs[0].began_s if runs else reserved_s
        yield PhaseSpan(Phase.UNREPORTED, engine_id, number, reserved_s, waited_s)
        yield from _running(runs, engine_id, number, first_token_s=attempt.first_token_s or _NEVER)
        return
    if arrived:
        complete_s = began_s + arrived[0]
    else:
        prefill = attempt.prefill
        prefilled_s = reserved_s if prefill is None else began_s + prefill.queued_s + prefill.prefill_s
        complete_s = prefilled_s + times.exposed_transfer_s
    exposed_s = complete_s - times.exposed_transfer_s
    yield PhaseSpan(Phase.TRANSFER_HIDDEN, engine_id, number, complete_s - times.transfer_s, exposed_s)
    yield PhaseSpan(Phase.TRANSFER_EXPOSED, engine_id, number, exposed_s, complete_s)
    runs = runs or [_Run(complete_s, None)]
    yield PhaseSpan(Phase.BATCH, engine_id, number, complete_s, runs[0].began_s)
    yield from _running(runs, engine_id, number, first_token_s=-_NEVER)


def _running(runs: list[_Run], engine_id: str, number: int, first_token_s: float) -> Iterator[PhaseSpan]:
    """Yield the times in the batch, divided at the first token, and the preemptions between them."""
    for index, run in enumerate(runs):
        divided_s = max(run.began_s, first_token_s if run.ended_s is None else min(first_token_s, run.ended_s))
        yield PhaseSpan(Phase.PREFILL, engine_id, number, run.began_s, divided_s)
        yield PhaseSpan(Phase.DECODE, engine_id, number, divided_s, run.ended_s)
        if index + 1 < len(runs) and run.ended_s is not None:
            yield PhaseSpan(Phase.PREEMPTED, engine_id, number, run.ended_s, runs[index + 1].began_s)


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
    return runs if began_s is None else [*runs, _Run(began_s, None)]


def _pairs(times: EngineTimes) -> Iterator[tuple[str, StatusAt]]:
    """Yield each status with the name of the one before it."""
    for before, one in itertools.pairwise(times.statuses):
        yield before.status, one


def _clip(span: PhaseSpan, began_s: float, end_s: float | None) -> PhaseSpan | None:
    """Return the part of a span within the attempt; None if there is none. Clocks and reports are not exact."""
    first_s, last_s = max(span.began_s, began_s), span.ended_s
    if end_s is not None:
        last_s = end_s if last_s is None else min(last_s, end_s)
    if last_s is not None and last_s <= first_s:
        return None
    if first_s == span.began_s and last_s == span.ended_s:
        return span
    return msgspec.structs.replace(span, began_s=first_s, ended_s=last_s)
