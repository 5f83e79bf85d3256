"""The thread that steps an engine core: `while: core.step()`, asleep on an event while nothing is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.engine_core import EngineCore
from actors.process.cpu_binding import CpuBinding
from actors.sessions.block_reports import BlockReports

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S = 0.5
_MAX_SLEEP_S = 3600.0
"""The longest sleep: a deadline may be further away than threading.Event can wait."""


class EngineThread:
    """Owns the only thread that may touch the core, except for its inbox.

    Invariant: the wake event is cleared before a step, and set after each entry into the inbox. So the next step takes
    in what arrives during a step, and an idle engine never sleeps while work is pending.
    """

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[dict[int, EngineCoreOutputs]], None],
        on_death: Callable[[BaseException], None],
        wake: threading.Event,
        binding: CpuBinding | None = None,
        block_reports: BlockReports | None = None,
    ) -> None:
        """deliver and on_death are called on the engine thread; wake is shared with the connector's worker side.

        binding:       the cores of the thread; None leaves it on any
        block_reports: report what the prefix cache has, twice a second while the engine steps, and oftener if they must
        """
        self._block_reports = block_reports
        self._core = core
        self._deliver = deliver
        self._on_death = on_death
        self._wake = wake
        self._binding = binding
        self._is_stopping = False
        self._step_began_s: float | None = None
        self._stats, self._num_taken = core.make_stats(), core.num_taken_by_client()
        self._num_taken_from_all, self._stats_at_s = core.num_taken_from_all, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the current step, then release the core. Raises TimeoutError if the step does not end in time."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s:.0f} s")

    def wake(self) -> None:
        """Wake the thread after an entry into the core's inbox."""
        self._wake.set()

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot, at most half a second old while the engine steps."""
        return self._stats

    def stats_for(self, client_index: int) -> SchedulerStats:
        """Return the newest snapshot, with the numbers of requests, the client's and all, that were taken in before."""
        stats, load, num_taken = self._stats, self._stats.load_report, self._num_taken
        if load is None:
            return stats
        own, total = num_taken.get(client_index, 0), self._num_taken_from_all
        describes_in_s = load.describes_in_s - (time.monotonic() - self._stats_at_s)
        counted = replace(load, num_taken_requests=own, num_taken_from_all=total, describes_in_s=describes_in_s)
        return replace(stats, load_report=counted)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request, from the request's submission on. Never out of date, unlike `stats`.

        It is False for the moments in which an engine without a request looks for work, too.
        """
        # A submission changes these three values in the order in which they are read here, so at least one shows it.
        return not self._wake.is_set() and self._step_began_s is None and not self._stats.has_requests

    @property
    def seconds_in_step(self) -> float:
        """How long the present step has taken; 0 while there is nothing to do."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _run(self) -> None:
        try:
            if self._binding is not None:
                self._binding.bind_this_thread()
            self._step_until_stopped()
        except BaseException as error:
            # A broken invariant kills this engine and only this engine; the pool replaces it.
            logger.exception("the engine thread died")
            self._on_death(error)
        finally:
            self._core.shutdown()
            if self._binding is not None:
                self._binding.release()

    def _step_until_stopped(self) -> None:
        next_stats_s = 0.0
        while not self._is_stopping:
            self._step_began_s = time.monotonic()
            self._wake.clear()
            result = self._core.step()
            now_s = time.monotonic()
            if result.outputs:
                self._deliver(result.outputs)
            if now_s >= next_stats_s or result.is_idle or not self._stats.has_requests:
                # The older count with the newer load is harmless for a moment: a client then counts a request twice.
                self._stats, self._num_taken = self._core.make_stats(), self._core.num_taken_by_client()
                self._num_taken_from_all, self._stats_at_s = self._core.num_taken_from_all, now_s
                next_stats_s = now_s + _STATS_INTERVAL_S
                if self._block_reports is not None:
                    self._block_reports.report()
            elif self._block_reports is not None and self._block_reports.is_due:
                self._block_reports.report()
            self._step_began_s = None
            # Checked again: stop() may have come after the loop did, and just before the event was cleared.
            if result.is_idle and not self._is_stopping:
                deadline_s = self._core.seconds_to_next_deadline()
                self._wake.wait(_MAX_SLEEP_S if deadline_s is None else min(deadline_s, _MAX_SLEEP_S))
