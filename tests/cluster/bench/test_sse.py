from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench import sse
from cluster.bench.sse import EventReader, EventTooLong, decode_event

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\r\n\r\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_found_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [event for begin, end in pairwise(ends) for event in reader.feed(STREAM[begin:end])]
    assert found == EVENTS


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
    reader = EventReader()
    reader.feed(b"data: 1234")
    with pytest.raises(EventTooLong):
        reader.feed(b"5")


@pytest.mark.parametrize(
    ("data", "has_text", "is_begin"),
    [
        (b'{"choices":[{"index":0,"text":"a"}],"usage":null}', True, False),
        (b'{"choices":[{"index":0,"text":""}]}', False, False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False, True),
        (b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', True, False),
        (b'{"choices":[{"delta":{"content":""}}]}', False, False),
        (b'{"choices":[{"delta":{}}]}', False, False),
        (b'{"choices":[{"delta":{"reasoning_content":"a"}}]}', True, False),
        (b'{"choices":[{"delta":{"reasoning":"a"}}]}', True, False),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True, False),
    ],
)
def test_a_choice_says_whether_it_shows_something(data: bytes, has_text: bool, is_begin: bool) -> None:
    [choice] = decode_event(data).choices
    assert (choice.has_text, choice.is_begin_of_message) == (has_text, is_begin)


def test_an_error_is_told_from_none() -> None:
    assert decode_event(b'{"error": {"message": "no"}}').has_error
    assert not decode_event(b'{"error": null}').has_error
    assert not decode_event(b"{}").has_error
