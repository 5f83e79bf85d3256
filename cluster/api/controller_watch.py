"""Keeps the controller's newest status at hand, so that nothing that reads it often has to call the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cluster.api.shared.admin import ClusterAdmin
from cluster.errors import ControllerUnavailable
from cluster.observability.status import ControllerView

_TIMEOUT_S: Final = 2.0
_INTERVAL_S: Final = 5.0
"""Seconds between two questions: the states of engines change rarely, and their counters come over sessions."""


class ControllerWatch:
    """The controller's status as of its last answer. run() asks again and again; ask() asks now.

    newest: with the reason as its error if the controller did not answer the last time
    """

    def __init__(
        self, admin: ClusterAdmin, wall_clock: Callable[[], float] = time.time, *, interval_s: float = _INTERVAL_S
    ) -> None:
        """Ask nothing yet. wall_clock: Unix time in seconds; interval_s: from an answer to the next question"""
        self._admin = admin
        self._wall_clock = wall_clock
        self._interval_s = interval_s
        self.newest = ControllerView(error="the controller has not been asked yet")

    async def ask(self) -> ControllerView:
        """Ask the controller now; returns its answer, or only the reason if it does not answer in time."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._admin.status()
        except (ControllerUnavailable, TimeoutError) as error:
            reason = str(error) or f"no answer within {_TIMEOUT_S:g} s"
            self.newest = ControllerView(error=reason, taken_at_s=self.newest.taken_at_s)
        else:
            self.newest = replace(answer, taken_at_s=self._wall_clock())
        return self.newest

    async def run(self) -> None:
        """Ask again and again, until the task is cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self._interval_s)
