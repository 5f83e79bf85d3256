"""The interface that starts further ranks, as processes of this host or as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.ranks.rank_messages import RankTask


class Ranks(Protocol):
    """Further ranks that were started."""

    def find_lost(self) -> str | None:
        """Say which rank has ended, and why, or return None; does not block."""

    def stop(self, timeout_s: float) -> None:
        """Wait until the ranks end, as the hub has told them to; kill those that do not end in time."""


class RankLauncher(Protocol):
    """Starts ranks; each runs rank_loop.run_rank()."""

    def __call__(self, tasks: Sequence[RankTask]) -> Ranks:
        """Start a rank for each task; returns at once."""
