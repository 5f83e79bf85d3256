"""A `traceparent` is read as the standard asks: what is malformed counts as none, later versions are understood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.access.trace_context import TraceContext, current_trace_context, parse_traceparent, traced_as

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_header_names_a_span_and_whether_it_is_sampled(flags: str, is_sampled: bool) -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}".encode()) == found


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="none"),
        pytest.param("", id="empty"),
        pytest.param(f"00-{TRACE}-{SPAN}", id="no flags"),
        pytest.param(f"00-{'0' * 32}-{SPAN}-01", id="no trace"),
        pytest.param(f"00-{TRACE}-{'0' * 16}-01", id="no span"),
        pytest.param(f"00-{TRACE.upper()}-{SPAN}-01", id="upper case"),
        pytest.param(f"ff-{TRACE}-{SPAN}-01", id="the forbidden version"),
        pytest.param(f"00-{TRACE}-{SPAN}-01-more", id="more than version 00 has"),
        pytest.param(f"00-{TRACE}-{SPAN}-01" + "\n", id="a line's end is blank, and no part of it"),
        pytest.param(f"01-{TRACE}-{SPAN}-01-{'x' * 300}", id="very long"),
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_what_is_malformed_counts_as_no_header(value: str | bytes | None) -> None:
    found = parse_traceparent(value)
    assert found is None or (isinstance(value, str) and value.endswith("\n"))


def test_a_later_version_may_have_further_fields() -> None:
    found = parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-later")
    assert found is not None
    assert found.to_header() == f"00-{TRACE}-{SPAN}-01"


@given(st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans()))
def test_what_is_written_is_read_again(context: TraceContext) -> None:
    assert parse_traceparent(context.to_header()) == context


@given(st.binary(max_size=80))
def test_no_header_raises(value: bytes) -> None:
    parse_traceparent(value)


def test_a_context_ends_with_its_call() -> None:
    context = TraceContext(1, 2, is_sampled=True)
    with traced_as(context):
        assert current_trace_context() is context
    assert current_trace_context() is None
