"""The waterfall has a bar for each phase, in its place on the axis, on screens of any width."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from cluster.commands.status.waterfall import Waterfall
from cluster.observability.stories.make_story import make_story
from cluster.observability.stories.request_story import RequestStory
from cluster.routing.request_record import RequestRecord
from tests.cluster.observability.stories.story_samples import ALONE, CONSUMER, HANDOFF, ended, preempted

replace = msgspec.structs.replace


def drawn(record: RequestRecord, width: int = 88) -> list[str]:
    return draw(make_story(record), width)


def draw(story: RequestStory, width: int) -> list[str]:
    output = StringIO()
    Console(file=output, width=width).print(Waterfall(story))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_each_phase_has_a_bar_where_it_was_on_the_axis() -> None:
    assert drawn(ended()) == [
        "                           0                         3.10 s              6.20 s",
        "ingress   admission        ▒                                                    100.0 ms",
        "prefill-0 queue            ░░░░░                                                500.0 ms",
        "decode-0  reservation      ░░                                                   200.0 ms",
        "prefill-0 prefill               ████████                                          1.00 s",
        "decode-0  hidden transfer          ▒▒▒▒▒                                        600.0 ms",
        "decode-0  exposed transfer              ░░░                                     400.0 ms",
        "decode-0  wait for batch                   ░                                    100.0 ms",
        "decode-0  decode                            ██████████████████████████████████    4.00 s",
    ]


def test_a_further_attempt_begins_with_its_number() -> None:
    lost = replace(HANDOFF, decode=None, failure="lost", ended_s=3.0)
    lines = drawn(ended(lost, replace(ALONE, began_s=3.5, first_token_s=5.0), duration_s=6.5))
    assert lines[lines.index("attempt 2") - 1].startswith("ingress   recovery")
    assert lines[lines.index("attempt 2") + 1].startswith("both-0    queue")


def test_a_preemption_is_a_gap_between_two_decodes() -> None:
    lines = drawn(ended(replace(HANDOFF, decode=preempted(CONSUMER, (3.0, 4.0)))))
    assert [line.split()[1] for line in lines[-3:]] == ["decode", "preempted", "decode"]


def test_a_request_in_flight_reaches_to_the_end_of_the_axis() -> None:
    lines = drawn(ended(replace(HANDOFF, decode=None), outcome=None, duration_s=None, in_flight_s=4.0))
    assert lines[-1].startswith("decode-0  decode")
    assert lines[-1].endswith("█   2.40 s")


def test_a_request_of_no_time_has_no_waterfall() -> None:
    assert drawn(RequestRecord("r", "", "i", 0.0, duration_s=0.0)) == []


def test_a_narrow_screen_shows_beginnings_in_place_of_bars() -> None:
    assert drawn(ended(), width=47)[:2] == [
        "ingress   admission        100.0 ms at 0.0 ms",
        "prefill-0 queue            500.0 ms at 100.0 ms",
    ]


@pytest.mark.parametrize("width", [10, 40, 60, 80, 300])
def test_no_line_of_a_waterfall_is_wider_than_the_screen(width: int) -> None:
    story = make_story(ended())
    long = tuple(replace(span, engine_id="engine-" * 20) for span in story.spans)
    for one in (story, replace(story, spans=long)):
        assert max(map(len, draw(one, width))) <= width
