"""Interfaces for starting further ranks, as processes of this host or as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.ranks.rank_messages import RankTask


class Ranks(Protocol):
    """Further ranks that were started."""

    def find_lost(self) -> str | None:
        """Return which rank has ended, and why, or None if none has. Does not block."""

    def stop(self, timeout_s: float) -> None:
        """Wait until the ranks end, after the hub has told them to. Kill those that have not ended after timeout_s."""


class RankLauncher(Protocol):
    """Starts ranks, each of which runs rank_loop.run_rank()."""

    def __call__(self, tasks: Sequence[RankTask]) -> Ranks:
        """Start a rank for each task, without waiting for it."""
