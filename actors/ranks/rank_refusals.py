"""Tells rank 0 how many connections a further rank has refused.

At most two reports a second are sent, and the newest total is always reported in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_INTERVAL_S: Final = 0.5


class RefusalReports:
    """Reports to rank 0 the total of refused connections."""

    def __init__(self, send: Callable[[int], None]) -> None:
        """send: sends a total to rank 0; called on a timer's thread."""
        self._send = send
        self._lock = threading.Lock()
        self._total = 0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def note(self, total: int) -> None:
        """Report this total, or a later one, within half a second. Safe from any thread; returns at once."""
        with self._lock:
            self._total = max(self._total, total)
            if self._timer is None and not self._is_closed:
                self._timer = threading.Timer(_INTERVAL_S, self._report)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Stop reporting."""
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
