"""Tells rank 0 how many connections a further rank has refused: at most twice a second, and the last total always."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_INTERVAL_S: Final = 0.5


class RefusalReports:
    """Reports totals to rank 0. note() may be called from any thread, and returns at once."""

    def __init__(self, send: Callable[[int], None]) -> None:
        """send: called with the newest total, on a timer's thread."""
        self._send = send
        self._lock = threading.Lock()
        self._total = 0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def note(self, total: int) -> None:
        """Report this total, or a later one, soon."""
        with self._lock:
            self._total = max(self._total, total)
            if self._timer is None and not self._is_closed:
                self._timer = threading.Timer(_INTERVAL_S, self._report)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Report nothing more."""
        with self._lock:
            self._is_closed = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join()

    def _report(self) -> None:
        with self._lock:
            self._timer = None
            total = self._total
        self._send(total)
