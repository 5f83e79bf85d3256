"""Further ranks as threads of the test's process: everything is real but their address space."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from actors.ranks.rank_loop import run_rank
from actors.ranks.rank_messages import RankTask

_HOST = "127.0.0.1"


class RankThreads:
    """A RankLauncher's result, without the seconds that a process takes to import torch."""

    def __init__(self, tasks: Sequence[RankTask]) -> None:
        self._threads = [
            threading.Thread(target=run_rank, args=(task, _HOST), name=f"{task.engine_id}-rank-{task.tp_rank}")
            for task in tasks
        ]
        for thread in self._threads:
            thread.start()

    def find_lost(self) -> str | None:
        gone = [thread.name for thread in self._threads if not thread.is_alive()]
        return f"{gone[0]} has ended" if gone else None

    def stop(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"{thread.name} did not end within {timeout_s} s"
