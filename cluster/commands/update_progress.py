"""Decides what `raypd update --wait` waits for, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.api.protos.raypd.v1 import admin_pb2

_WITHOUT_PLACE: Final = frozenset({"pending", "quarantined"})
_PATIENCE_S: Final = 30.0
"""How long an engine that finds no place, or was taken out of service, is waited for once all others are done."""


class UpdateProgress:
    """An update as the status shows it.

    It is done once every engine that serves has the new version, and the others have been without a place to serve for
    30 seconds: nobody knows when these come up, and then they serve the new version.
    """

    def __init__(
        self, version: int, tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """tell: is called with each news of how far the update is; clock: monotonic, in seconds"""
        self._version = version
        self._tell = tell
        self._clock = clock
        self._told = ""
        self._missing: dict[str, str] = {}
        self._first_without_place_s: float | None = None

    def is_done(self, status: admin_pb2.GetStatusResponse) -> bool:
        """Take a status in; returns whether nothing is left to wait for."""
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
        return now_s - self._first_without_place_s >= _PATIENCE_S

    def what_is_missing(self) -> str:
        """Name the engines that do not serve the new version yet, and what each waits for; empty if all serve it."""
        return ", ".join(f"{engine_id} ({what})" for engine_id, what in sorted(self._missing.items()))

    def _serves(self, engine: admin_pb2.EngineStatus) -> bool:
        return engine.state == "ready" and engine.model_version == self._version


def _describe(engine: admin_pb2.EngineStatus) -> str:
    if engine.state == "ready":
        return f"it serves version {engine.model_version}"
    return f"{engine.state}: {engine.last_error}" if engine.last_error else engine.state
