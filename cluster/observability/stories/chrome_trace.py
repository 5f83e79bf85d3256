"""Writes stories as a trace in Chrome's JSON form, which ui.perfetto.dev and chrome://tracing open.

Each ingress and each engine is a process. The phases of a request are asynchronous events (b, e), one row for each
attempt: the requests of an engine overlap, which the events of one thread must not. An arrow (s, f) begins and ends in
events of threads, so a handoff's transfer is an event (X) in a thread of its producer and in one of its consumer, with
an arrow from one to the other; transfers that overlap are in different threads.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from cluster.observability.stories.request_story import Phase, PhaseSpan, RequestStory

_Event: TypeAlias = dict[str, object]
_CATEGORY: Final = "request"
_REQUESTS: Final = 0
"""The thread of the asynchronous events, and of what belongs to the whole process."""


class _Handoff(msgspec.Struct, frozen=True):
    """The transfer of one attempt. Times are in microseconds from the beginning of the trace."""

    story: RequestStory
    identity: str
    producer: str
    consumer: str
    began_us: float
    ended_us: float


class _Threads:
    """The threads of one process, such that the transfers in each thread follow one another."""

    def __init__(self) -> None:
        self._ended_us: list[float] = []

    def find(self, handoff: _Handoff) -> int:
        """Return the number of a thread for a transfer; transfers come in the order of their beginnings."""
        for number, ended_us in enumerate(self._ended_us):
            if ended_us <= handoff.began_us:
                self._ended_us[number] = handoff.ended_us
                return number + 1
        self._ended_us.append(handoff.ended_us)
        return len(self._ended_us)


def chrome_trace(stories: Sequence[RequestStory]) -> bytes:
    """Return the trace of these requests as a JSON object. Its time 0 is the first arrival."""
    origin_ns = min((story.arrived_at_ns for story in stories), default=0)
    names = sorted({name for story in stories for name in (story.ingress, *story.engine_ids)})
    pids = {name: number for number, name in enumerate(names, start=1)}
    events: list[_Event] = [_name_of("process", pid, _REQUESTS, name) for name, pid in pids.items()]
    handoffs: list[_Handoff] = []
    for index, story in enumerate(stories):
        arrived_us = (story.arrived_at_ns - origin_ns) / 1000
        events += _request(story, pids, arrived_us, str(index))
        handoffs += _handoffs(story, arrived_us, str(index))
    events += _transfers(sorted(handoffs, key=lambda handoff: handoff.began_us), pids)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_ns": origin_ns}})


def _request(story: RequestStory, pids: dict[str, int], arrived_us: float, number: str) -> Iterator[_Event]:
    """Yield the phases and events of one request. number: of the request in the trace; request ids may repeat"""
    ingress = pids[story.ingress]
    about: _Event = {
        "request_id": story.request_id,
        "tenant": story.tenant,
        "model": story.model,
        "outcome": story.outcome or "in flight",
        "cause": story.cause,
        "prompt_tokens": story.num_prompt_tokens,
        "cached_tokens": story.num_cached_tokens,
        "output_tokens": story.num_output_tokens,
        "attempts": story.num_attempts,
        "moves": story.num_moves,
        "preemptions": story.num_preemptions,
    }
    whole: _Event = {"cat": _CATEGORY, "name": story.request_id, "id": number, "pid": ingress, "tid": _REQUESTS}
    yield whole | {"ph": "b", "ts": _round(arrived_us), "args": about}
    for span in story.spans:
        if span.phase is not Phase.TRANSFER_HIDDEN:
            yield from _phase(story, span, pids[span.engine_id] if span.engine_id else ingress, arrived_us, number)
    for event in story.events:
        at = {"cat": _CATEGORY, "name": event.kind.value, "id": number, "pid": ingress, "tid": _REQUESTS}
        yield at | {"ph": "n", "ts": _round(arrived_us + event.at_s * 1e6), "args": {"text": event.text}}
    yield whole | {"ph": "e", "ts": _round(arrived_us + story.duration_s * 1e6)}


def _phase(story: RequestStory, span: PhaseSpan, pid: int, arrived_us: float, number: str) -> Iterator[_Event]:
    # The phases at the ingress are drawn within the whole request.
    identity = f"{number}.{span.attempt}" if span.engine_id else number
    at: _Event = {"cat": _CATEGORY, "name": span.phase.value, "id": identity, "pid": pid, "tid": _REQUESTS}
    args = {"request_id": story.request_id, "attempt": span.attempt}
    yield at | {"ph": "b", "ts": _round(arrived_us + span.began_s * 1e6), "args": args}
    yield at | {"ph": "e", "ts": _round(arrived_us + _end_s(story, span) * 1e6)}


def _handoffs(story: RequestStory, arrived_us: float, number: str) -> Iterator[_Handoff]:
    for attempt in dict.fromkeys(span.attempt for span in story.spans):
        spans = [span for span in story.spans if span.attempt == attempt]
        prefill = next((span for span in spans if span.phase is Phase.PREFILL), None)
        moved = [span for span in spans if span.phase in (Phase.TRANSFER_HIDDEN, Phase.TRANSFER_EXPOSED)]
        # What an engine fetches while it does all of a request has no producer that is known here.
        if prefill is None or not moved or moved[0].engine_id == prefill.engine_id:
            continue
        began_us = _round(arrived_us + min(span.began_s for span in moved) * 1e6)
        ended_us = _round(arrived_us + max(_end_s(story, span) for span in moved) * 1e6)
        identity = f"{number}.{attempt}"
        yield _Handoff(story, identity, prefill.engine_id, moved[0].engine_id, began_us, ended_us)


def _transfers(handoffs: Sequence[_Handoff], pids: dict[str, int]) -> Iterator[_Event]:
    threads = {name: _Threads() for name in pids}
    named: set[tuple[int, int]] = set()
    for handoff in handoffs:
        story, length_us = handoff.story, handoff.ended_us - handoff.began_us
        args = {
            "request_id": story.request_id,
            "bytes": story.num_transferred_bytes,
            "exposed_s": story.exposed_transfer_s,
        }
        for name, arrow in ((handoff.producer, {"ph": "s"}), (handoff.consumer, {"ph": "f", "bp": "e"})):
            pid, tid = pids[name], threads[name].find(handoff)
            if (pid, tid) not in named:
                named.add((pid, tid))
                yield _name_of("thread", pid, tid, f"transfers {tid}")
            at: _Event = {"cat": "transfer", "name": "transfer", "pid": pid, "tid": tid}
            yield at | {"ph": "X", "ts": handoff.began_us, "dur": _round(length_us), "args": args}
            yield at | {"id": handoff.identity, "ts": _round(handoff.began_us + length_us / 2)} | arrow


def _name_of(kind: str, pid: int, tid: int, name: str) -> _Event:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _end_s(story: RequestStory, span: PhaseSpan) -> float:
    return story.duration_s if span.ended_s is None else span.ended_s


def _round(microseconds: float) -> float:
    """Round to nanoseconds, so that one phase ends exactly where the next one begins."""
    return round(microseconds, 3)
