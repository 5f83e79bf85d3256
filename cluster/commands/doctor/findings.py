"""A finding: the result of one check."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30


class Verdict(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """It serves, but slower, or only as long as nothing else happens."""
    FAILURE = "failure"
    """It does not serve like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """advice: what to change; empty if nothing. node: where, in a cluster."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    node: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Better changed."""
    return Finding(check, Verdict.WARNING, found, advice)


def failure(check: str, found: str, advice: str) -> Finding:
    """To be changed first."""
    return Finding(check, Verdict.FAILURE, found, advice)


def gib(size_bytes: float) -> str:
    """For people."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"
