"""Makes the story of a request from its record: the phases of all its attempts, its events, and the cause in words."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Final

from cluster.observability.stories import phases
from cluster.observability.stories.attempt_spans import attempt_spans
from cluster.observability.stories.find_cause import find_cause
from cluster.observability.stories.request_story import EventKind, PhaseSpan, RequestStory, StoryEvent
from cluster.routing.request_record import AttemptRecord, RequestRecord

_GOOD_ENDS: Final = ("stop", "length")
_BEGAN_S: Final = operator.attrgetter("began_s")
_AT_S: Final = operator.attrgetter("at_s")
_FIRST_TOKEN: Final = EventKind.FIRST_TOKEN


def make_story(record: RequestRecord) -> RequestStory:
    """Return the story of a request, as far as its record goes. Pure."""
    duration_s = record.duration_s if record.duration_s is not None else record.in_flight_s or 0.0
    spans = spans_of(record)
    last = record.attempts[-1] if record.attempts else None
    handoff, computing, num_moves, num_preemptions = None, None, 0, 0
    for one in record.attempts:
        num_moves += len(one.moved_s)
        if one.prefill is not None:
            num_preemptions += one.prefill.num_preemptions
        if (decode := one.decode) is not None:
            num_preemptions += decode.num_preemptions
            handoff = decode if decode.transfer_s else handoff
        computing = one.computing if computing is None else computing
    terms = None if last is None or last.decision is None else last.decision.chosen
    return RequestStory(
        request_id=record.request_id,
        tenant=record.tenant,
        model=record.model,
        model_version=record.model_version,
        ingress=record.ingress,
        arrived_at_ns=int(record.arrived_at_s * 1e9),
        duration_s=duration_s,
        outcome=record.outcome,
        error="" if last is None or record.outcome in _GOOD_ENDS else last.failure,
        ttft_s=record.ttft_s,
        itl_p50_s=record.itl_p50_s,
        itl_max_s=record.itl_max_s,
        way="" if terms is None else terms.way.value,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=0 if computing is None else min(computing.num_cached_tokens, record.num_prompt_tokens),
        num_attempts=len(record.attempts) + record.num_attempts_left_out,
        num_moves=num_moves,
        num_preemptions=num_preemptions,
        num_transferred_bytes=0 if handoff is None else handoff.num_transferred_bytes,
        transfer_s=0.0 if handoff is None else handoff.transfer_s,
        exposed_transfer_s=0.0 if handoff is None else handoff.exposed_transfer_s,
        spans=spans,
        events=_events(record, spans),
        cause=find_cause(record, spans, duration_s),
    )


def spans_of(record: RequestRecord) -> tuple[PhaseSpan, ...]:
    """Return the phases of a request, as far as its record goes, in the order of their beginnings."""
    spans: list[PhaseSpan] = []
    admitted_s = record.attempts[0].began_s if record.attempts else record.duration_s
    if admitted_s is None or admitted_s > 0:
        spans.append(PhaseSpan(phases.ADMISSION, "", 0, 0.0, admitted_s))
    failed_s: float | None = None
    for number, attempt in number_attempts(record):
        if failed_s is not None and attempt.began_s > failed_s:
            spans.append(PhaseSpan(phases.RECOVERY, "", number - 1, failed_s, attempt.began_s))
        spans += attempt_spans(attempt, number, record.duration_s if attempt.ended_s is None else attempt.ended_s)
        failed_s = None if attempt.was_left else attempt.ended_s
    if failed_s is not None and (record.duration_s is None or record.duration_s > failed_s):
        spans.append(PhaseSpan(phases.RECOVERY, "", number, failed_s, record.duration_s))
    spans.sort(key=_BEGAN_S)
    return tuple(spans)


def number_attempts(record: RequestRecord) -> list[tuple[int, AttemptRecord]]:
    """Return the attempts of a record with their numbers, from 1 on."""
    left_out = record.num_attempts_left_out
    return [(index + 1 + (left_out if index else 0), attempt) for index, attempt in enumerate(record.attempts)]


def _events(record: RequestRecord, spans: tuple[PhaseSpan, ...]) -> tuple[StoryEvent, ...]:
    """Return the events in the order of their times."""
    events: list[StoryEvent] = []
    if record.ttft_s is not None:
        events.append(StoryEvent(_FIRST_TOKEN, record.ttft_s, "", 0, "first token"))
    for span in spans:
        if span.phase is phases.PREEMPTED:
            text = f"{span.engine_id} preempted the request: its KV cache had no free block"
            events.append(StoryEvent(EventKind.PREEMPTED, span.began_s, span.engine_id, span.attempt, text))
    for index, (number, attempt) in enumerate(number_attempts(record)):
        if attempt.moved_s or attempt.prefill_failure or attempt.ended_s is not None:
            went_to = next((one.computing_engine_id for one in record.attempts[index + 1 :]), "")
            events += _events_of_attempt(attempt, number, spans, went_to)
    events.sort(key=_AT_S)
    return tuple(events)


def _events_of_attempt(
    attempt: AttemptRecord, number: int, spans: tuple[PhaseSpan, ...], went_to: str
) -> Iterator[StoryEvent]:
    """went_to: the engine that the prompt of the next attempt went to, if there is one"""
    decoders = attempt.decode_engine_ids
    for moved_s, (left, taken) in zip(attempt.moved_s, itertools.pairwise(decoders), strict=False):
        yield StoryEvent(EventKind.MOVED, moved_s, taken, number, f"migrated from {left} to {taken}")
    if attempt.prefill_failure:
        lost = [one for one in spans if one.attempt == number and one.engine_id == attempt.prefill_engine_id]
        at_s = (lost[-1].ended_s if lost else None) or attempt.began_s
        text = f"{decoders[-1]} computed the prompt instead: {attempt.prefill_failure}"
        yield StoryEvent(EventKind.FAILED, at_s, attempt.prefill_engine_id or "", number, text)
    if attempt.was_left and attempt.ended_s is not None:
        here = attempt.computing_engine_id
        text = f"rerouted from the queue of {here} to {went_to}, which had run out of prompts"
        yield StoryEvent(EventKind.REROUTED, attempt.ended_s, here, number, text)
    elif attempt.ended_s is not None:
        yield StoryEvent(EventKind.FAILED, attempt.ended_s, decoders[-1], number, attempt.failure)
