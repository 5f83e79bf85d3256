"""Findings: the results of checks, each with a verdict and advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30


class Verdict(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """The cluster would serve, but slowly, or with little room for anything unexpected."""
    FAILURE = "failure"
    """The cluster would not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    check:  what was checked, such as "clocks"
    found:  what was found, for people
    advice: what to change; empty if nothing has to change
    node:   the address of the node that was checked; empty if the finding is about no single node
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    node: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding that nothing has to be changed."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Return a finding that something should be changed, although the cluster would serve."""
    return Finding(check, Verdict.WARNING, found, advice)


def failure(check: str, found: str, advice: str) -> Finding:
    """Return a finding that something has to be changed before the cluster can serve."""
    return Finding(check, Verdict.FAILURE, found, advice)


def gib(size_bytes: float) -> str:
    """Return a size for people, in GiB, or in MiB if it is small."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"
