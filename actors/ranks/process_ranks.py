"""Starts further ranks as processes of this host, for engines without Ray and for tests."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess

from actors.ranks.rank_loop import run_rank
from actors.ranks.rank_messages import RankTask


class ProcessRanks:
    """The processes of further ranks. Implements Ranks.

    The processes are spawned, not forked, since the threads of gRPC and torch do not survive a fork.
    """

    def __init__(self, tasks: Sequence[RankTask]) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: dict[int, SpawnProcess] = {
            task.tp_rank: context.Process(
                target=run_rank, args=(task, task.hub[0]), name=f"{task.engine_id}-rank-{task.tp_rank}", daemon=True
            )
            for task in tasks
        }
        for process in self.processes.values():
            process.start()

    def find_lost(self) -> str | None:
        """Return which rank's process has ended, or None. Does not block."""
        for rank, process in self.processes.items():
            if process.exitcode is not None:
                return f"rank {rank}: its process ended with exit code {process.exitcode} before it connected"
        return None

    def stop(self, timeout_s: float) -> None:
        """Wait until the processes end. Kill those that have not ended after timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.processes = {}
