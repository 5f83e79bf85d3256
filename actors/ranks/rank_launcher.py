"""How further ranks come to be: as processes of this host, or as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.ranks.rank_messages import RankTask


class Ranks(Protocol):
    """Further ranks that were started."""

    def find_lost(self) -> str | None:
        """Which one is gone, if any is; does not block."""

    def stop(self, timeout_s: float) -> None:
        """Wait for their end, which the hub has asked for; kill those that do not come to it."""


class RankLauncher(Protocol):
    """Starts ranks; each runs rank_loop.run_rank()."""

    def __call__(self, tasks: Sequence[RankTask]) -> Ranks:
        """Start a rank for each task; returns at once."""
