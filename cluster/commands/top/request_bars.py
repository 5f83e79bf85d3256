"""Turns the story of a request into the phases of one bar: what happened to the request at each moment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from cluster.observability.stories.request_story import Phase, RequestStory

_BAR_PHASES: Final[Mapping[Phase, str]] = {
    Phase.RECOVERY: "recovery",
    Phase.PREEMPTED: "preempted",
    Phase.TRANSFER_EXPOSED: "transfer",
    Phase.DECODE: "decode",
    Phase.PREFILL: "prefill",
    Phase.BATCH: "queue",
    Phase.RESERVATION: "queue",
    Phase.QUEUE: "queue",
    Phase.ADMISSION: "queue",
    Phase.UNREPORTED: "unreported",
}
"""The name of each phase in a bar. Where several go on at once, the first one of these is drawn.

A transfer that a prefill hides is not drawn: nobody waits for it.
"""
_RANKS: Final = {phase: rank for rank, phase in enumerate(_BAR_PHASES)}


def bar_phases(story: RequestStory) -> list[tuple[str, float]]:
    """Return the names of a bar's phases and their seconds, in the order in which they came."""
    spans = [
        (span.began_s, story.duration_s if span.ended_s is None else span.ended_s, span.phase)
        for span in story.spans
        if span.phase in _RANKS
    ]
    times = sorted({time_s for began_s, ended_s, _ in spans for time_s in (began_s, ended_s)})
    phases: list[tuple[str, float]] = []
    for began_s, ended_s in itertools.pairwise(times):
        going_on = [phase for first_s, last_s, phase in spans if first_s <= began_s and last_s >= ended_s]
        if not going_on:
            continue
        name = _BAR_PHASES[min(going_on, key=_RANKS.__getitem__)]
        if phases and phases[-1][0] == name:
            phases[-1] = name, phases[-1][1] + ended_s - began_s
        else:
            phases.append((name, ended_s - began_s))
    return phases
