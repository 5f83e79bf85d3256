from __future__ import annotations

import msgspec
import pytest

from cluster.commands.top.request_bars import bar_phases
from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import Phase, PhaseSpan, RequestStory
from cluster.routing.request_record import RequestRecord


def _story(*spans: tuple[Phase, float, float | None], duration_s: float = 10.0) -> RequestStory:
    empty = make_story(RequestRecord("r", "", "ingress-0", 0.0, "stop", duration_s=duration_s))
    told = tuple(PhaseSpan(phase, "e", 1, began_s, ended_s) for phase, began_s, ended_s in spans)
    return msgspec.structs.replace(empty, spans=told)


def test_phases_follow_each_other() -> None:
    story = _story(
        (Phase.ADMISSION, 0.0, 1.0), (Phase.QUEUE, 1.0, 2.0), (Phase.PREFILL, 2.0, 4.0), (Phase.DECODE, 4.0, 10.0)
    )
    assert bar_phases(story) == [("queue", 2.0), ("prefill", 2.0), ("decode", 6.0)]


def test_of_phases_at_once_the_one_that_explains_more_is_drawn() -> None:
    story = _story(
        (Phase.QUEUE, 0.0, 3.0),
        (Phase.RESERVATION, 0.0, 2.0),
        (Phase.PREFILL, 3.0, 5.0),
        (Phase.TRANSFER_HIDDEN, 3.5, 5.0),
        (Phase.TRANSFER_EXPOSED, 5.0, 6.0),
        (Phase.DECODE, 5.5, 10.0),
        (Phase.PREEMPTED, 7.0, 8.0),
    )
    assert bar_phases(story) == [
        ("queue", 3.0),
        ("prefill", 2.0),
        ("transfer", 1.0),
        ("decode", 1.0),
        ("preempted", 1.0),
        ("decode", 2.0),
    ]


def test_a_phase_that_goes_on_ends_now() -> None:
    assert bar_phases(_story((Phase.UNREPORTED, 1.0, None), duration_s=3.0)) == [("unreported", 2.0)]


@pytest.mark.parametrize("spans", [(), ((Phase.TRANSFER_HIDDEN, 0.0, 1.0),)])
def test_what_nobody_waits_for_is_not_drawn(spans: tuple[tuple[Phase, float, float], ...]) -> None:
    assert bar_phases(_story(*spans)) == []
