"""What a profile of an engine says; free of torch, for those who only hand it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What was seen.

    summary: a table of operators, those that took the most time by themselves first
    trace:   for chrome://tracing or Perfetto, gzip; empty if it was not asked for or is too large
    """

    summary: str
    trace: bytes
