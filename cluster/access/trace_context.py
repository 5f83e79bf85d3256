"""The trace context that a call brings with it: the header `traceparent` of https://www.w3.org/TR/trace-context/.

A call's context is a context variable, like its caller: an API server sets it while it handles the call, and requests
that are made within carry it to Serving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

HEADER: Final = "traceparent"
_MAX_CHARS: Final = 256
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of another program, to which spans of a request belong.

    trace_id:   128 bits; span_id: 64 bits; neither is 0
    is_sampled: whether the other program records the trace
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    def to_header(self) -> str:
        """Return the value of the header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(value: str | bytes | None) -> TraceContext | None:
    """Return the context of a header; None without one, and for one that is malformed, as the standard asks."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if value is None or len(value) > _MAX_CHARS or (match := _FORM.fullmatch(value.strip())) is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Later versions may have further fields; version 00 has none, and ff is forbidden.
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


_context: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def current_trace_context() -> TraceContext | None:
    """Return the context that the current task's call has brought; None if it has brought none."""
    return _context.get()


def set_trace_context(context: TraceContext | None) -> None:
    """Set the context for the rest of the current task and the tasks that it starts. Each call needs its own task."""
    _context.set(context)


@contextmanager
def traced_as(context: TraceContext | None) -> Iterator[None]:
    """Set the context that current_trace_context() returns within the Python context."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)
