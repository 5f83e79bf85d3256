"""Decides when `raypd update --wait` stops waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.api.protos.raypd.v1 import admin_pb2

_WITHOUT_PLACE: Final = frozenset({"pending", "quarantined"})
_NO_PLACE_TIMEOUT_S: Final = 30.0
"""The seconds for which the update still waits for pending or quarantined engines once all others are done."""


class UpdateProgress:
    """The progress of an update, as statuses of the cluster show it.

    The update is done once every engine serves the new version. Pending and quarantined engines are waited for only 30
    seconds longer than the others: nothing tells when they start, and they will serve the new version then.
    """

    def __init__(
        self, version: int, tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to watch an update.

        version: the new model version
        tell:    called with a line of text whenever the update has made progress
        clock:   returns monotonic seconds
        """
        self._version = version
        self._tell = tell
        self._clock = clock
        self._told = ""
        self._missing: dict[str, str] = {}
        self._first_without_place_s: float | None = None

    def is_done(self, status: admin_pb2.GetStatusResponse) -> bool:
        """Note a new status. Returns whether the wait is over."""
        missing = [engine for engine in status.engines if not self._serves(engine)]
        self._missing = {engine.engine_id: _describe(engine) for engine in missing}
        if status.update and status.update != self._told:
            self._told = status.update
            self._tell(status.update)
        if not missing:
            return True
        if status.update or any(engine.state not in _WITHOUT_PLACE for engine in missing):
            self._first_without_place_s = None
            return False
        now_s = self._clock()
        if self._first_without_place_s is None:
            self._first_without_place_s = now_s
        return now_s - self._first_without_place_s >= _NO_PLACE_TIMEOUT_S

    def what_is_missing(self) -> str:
        """Return the engines that do not serve the new version yet, each with its state; empty if all serve it."""
        return ", ".join(f"{engine_id} ({what})" for engine_id, what in sorted(self._missing.items()))

    def _serves(self, engine: admin_pb2.EngineStatus) -> bool:
        return engine.state == "ready" and engine.model_version == self._version


def _describe(engine: admin_pb2.EngineStatus) -> str:
    if engine.state == "ready":
        return f"it serves version {engine.model_version}"
    return f"{engine.state}: {engine.last_error}" if engine.last_error else engine.state
