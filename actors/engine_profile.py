"""The result of profiling an engine; imports no torch, for modules that only pass it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """A profile of an engine.

    summary: a table of operators, those with the most time of their own first
    trace:   gzipped trace for chrome://tracing or Perfetto; empty if it was not requested or is too large
    """

    summary: str
    trace: bytes
