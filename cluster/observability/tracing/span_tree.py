"""Describes the spans of one request, made from its story. Pure: span_export.py makes OpenTelemetry's spans of them.

The names of attributes that begin with gen_ai are those of https://github.com/open-telemetry/semantic-conventions-genai,
which are still in development; they are written out here because the library of constants calls them deprecated.
No attribute has a prompt, a token or a text; stop strings are texts of the client's as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.observability.stories.make_story import make_story, number_attempts
from cluster.observability.stories.request_story import EventKind, Phase, PhaseSpan, RequestStory, StoryEvent
from cluster.routing.decision import Decision, RouteTerms
from cluster.routing.request_record import AttemptRecord, RequestRecord

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, Value]

MAX_SPANS: Final = 64
"""The most spans of one request; of a request that failed or was preempted more often, the first ones are sent."""
_MAX_CHARS: Final = 256
_MAX_ENGINES: Final = 16
_MAX_INT: Final = 2**63 - 1
"""The largest integer of OTLP."""
_GOOD_ENDS: Final = ("stop", "length")
_NOT_OUR_ERRORS: Final = (*_GOOD_ENDS, "done", "cancelled", "invalid")
"""Outcomes that do not make the span's status an error: semantic conventions leave a client's mistakes unset."""


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event within a span. at_ns: Unix time"""

    name: str
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanNode:
    """A span with the spans below it.

    began_ns, ended_ns: Unix time
    follows:            the index, among the children of the same span, of an earlier span that this one links to
    """

    name: str
    began_ns: int
    ended_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    children: tuple[SpanNode, ...] = ()
    follows: int | None = None
    error: str = ""


def make_span_tree(record: RequestRecord, operation: str, request: EngineCoreRequest | None) -> SpanNode:
    """Return the tree of a request that has ended.

    operation: gen_ai.operation.name
    request:   the tokenized request; None if it was never tokenized
    """
    story = make_story(record)
    times = _Times(story)
    admission = [times.node(Phase.ADMISSION.value, span) for span in story.spans if span.phase is Phase.ADMISSION]
    attempts: list[SpanNode] = []
    num_left = MAX_SPANS - 1 - len(admission)
    for number, attempt in number_attempts(record):
        node = _attempt(story, times, number, attempt)
        num_left -= 1 + len(node.children)
        if num_left < 0:
            break
        attempts.append(replace(node, follows=len(admission) + len(attempts) - 1) if attempts else node)
    is_error = story.outcome is not None and story.outcome not in _NOT_OUR_ERRORS
    return SpanNode(
        name=f"{operation} {story.model}".strip()[:_MAX_CHARS],
        began_ns=story.arrived_at_ns,
        ended_ns=times.at_ns(story.duration_s),
        attributes=_capped(_of_request(story, operation, request)),
        events=tuple(times.event(event) for event in story.events if event.kind is EventKind.FIRST_TOKEN),
        children=(*admission, *attempts),
        error=(story.error or story.cause)[:_MAX_CHARS] if is_error else "",
    )


class _Times:
    """Makes Unix times of a story's times."""

    def __init__(self, story: RequestStory) -> None:
        self._story = story

    def at_ns(self, seconds: float) -> int:
        return self._story.arrived_at_ns + int(seconds * 1e9)

    def end_ns(self, span: PhaseSpan) -> int:
        return self.at_ns(self._story.duration_s if span.ended_s is None else span.ended_s)

    def node(self, name: str, span: PhaseSpan, attributes: Attributes | None = None) -> SpanNode:
        engine: Attributes = {"raypd.engine": span.engine_id} if span.engine_id else {}
        return SpanNode(name, self.at_ns(span.began_s), self.end_ns(span), _capped({**engine, **(attributes or {})}))

    def event(self, event: StoryEvent) -> SpanEvent:
        attributes = {"raypd.engine": event.engine_id, "raypd.what": event.text}
        kept = {name: value[:_MAX_CHARS] for name, value in attributes.items() if value}
        return SpanEvent(event.kind.value, self.at_ns(event.at_s), kept)


def _attempt(story: RequestStory, times: _Times, number: int, attempt: AttemptRecord) -> SpanNode:
    spans = [span for span in story.spans if span.attempt == number and span.phase is not Phase.ADMISSION]
    ended_s = story.duration_s if attempt.ended_s is None else attempt.ended_s
    engines = [attempt.prefill_engine_id or "", *attempt.decode_engine_ids]
    attributes: dict[str, Value] = {
        "raypd.attempt": number,
        "raypd.engines": tuple(engine for engine in engines if engine),
        "raypd.new_tokens": attempt.num_new_tokens,
    }
    events = tuple(
        times.event(event)
        for event in story.events
        if event.attempt == number and event.kind is not EventKind.FIRST_TOKEN
    )
    route = [] if attempt.decision is None else [_route(times.at_ns(attempt.began_s), attempt.decision)]
    phases = [_phase(times, span, attempt) for span in spans if span.phase is not Phase.TRANSFER_HIDDEN]
    return SpanNode(
        name="attempt",
        began_ns=times.at_ns(attempt.began_s),
        ended_ns=max(times.at_ns(ended_s), times.at_ns(attempt.began_s)),
        attributes=_capped(attributes),
        events=events,
        children=(*route, *_transfer(times, spans, attempt), *phases),
        error=attempt.failure[:_MAX_CHARS],
    )


def _phase(times: _Times, span: PhaseSpan, attempt: AttemptRecord) -> SpanNode:
    attributes: dict[str, Value] = {}
    report = attempt.prefill if span.engine_id == attempt.prefill_engine_id else attempt.decode
    if span.phase is Phase.PREFILL and report is not None:
        attributes["raypd.computed_tokens"] = report.num_prompt_tokens_computed
        attributes["raypd.cached_tokens"] = report.num_cached_tokens
    elif span.phase is Phase.DECODE and report is not None:
        attributes["raypd.preemptions"] = report.num_preemptions
    return times.node(span.phase.value, span, attributes)


def _transfer(times: _Times, spans: Sequence[PhaseSpan], attempt: AttemptRecord) -> list[SpanNode]:
    """Return one span for the whole transfer of a handoff, of which the exposed part is a span of its own."""
    parts = [span for span in spans if span.phase in (Phase.TRANSFER_HIDDEN, Phase.TRANSFER_EXPOSED)]
    report = attempt.decode
    if not parts or report is None or attempt.prefill_engine_id is None or not report.transfer_s:
        return []
    whole = msgspec.structs.replace(parts[0], ended_s=parts[-1].ended_s)
    attributes: Attributes = {
        "raypd.producer": attempt.prefill_engine_id,
        "raypd.bytes": report.num_transferred_bytes,
        "raypd.transfer_s": report.transfer_s,
        "raypd.exposed_s": report.exposed_transfer_s,
    }
    return [times.node("transfer", whole, attributes)]


def _route(at_ns: int, decision: Decision) -> SpanNode:
    """Return the span of a routing decision: the chosen placement's terms, and an event for each other placement."""
    attributes: dict[str, Value] = {
        "raypd.route.mode": decision.mode.value,
        "raypd.route.reason": decision.reason.value,
    }
    if decision.chosen is not None:
        attributes |= _terms(decision.chosen)
    others = tuple(SpanEvent("not_chosen", at_ns, _capped(_terms(one))) for one in decision.others)
    return SpanNode("route", at_ns, at_ns, _capped(attributes), others)


def _terms(terms: RouteTerms) -> dict[str, Value]:
    named = {f"raypd.route.{name}": value for name, value in msgspec.structs.asdict(terms).items() if value is not None}
    return {name: str(value) if isinstance(value, str) else value for name, value in named.items()}


def _of_request(story: RequestStory, operation: str, request: EngineCoreRequest | None) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "raypd",
        "gen_ai.response.id": story.request_id,
        "gen_ai.usage.input_tokens": story.num_prompt_tokens,
        "gen_ai.usage.output_tokens": story.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": story.num_cached_tokens,
        "raypd.ingress": story.ingress,
        "raypd.model_version": story.model_version,
        "raypd.attempts": story.num_attempts,
        "raypd.moves": story.num_moves,
        "raypd.preemptions": story.num_preemptions,
        "raypd.cause": story.cause,
    }
    if story.model:
        attributes |= {"gen_ai.request.model": story.model, "gen_ai.response.model": story.model}
    if story.tenant:
        attributes["raypd.tenant"] = story.tenant
    if story.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = story.ttft_s
    if story.outcome in _GOOD_ENDS:
        attributes["gen_ai.response.finish_reasons"] = (story.outcome,)
    elif story.outcome is not None and story.outcome != "done":
        attributes["error.type"] = story.outcome
    if request is not None and request.pooling_params is None:
        attributes |= _of_sampling(request.sampling_params)
    return attributes


def _of_sampling(params: SamplingParams) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.output.type": "text",
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.seed <= _MAX_INT:
        attributes["gen_ai.request.seed"] = params.seed
    return attributes


def _capped(attributes: Attributes) -> Attributes:
    """Shorten texts: names come from clients."""
    return {name: _cap(value) for name, value in attributes.items()}


def _cap(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(one[:_MAX_CHARS] for one in value[:_MAX_ENGINES])
    return value[:_MAX_CHARS] if isinstance(value, str) else value
