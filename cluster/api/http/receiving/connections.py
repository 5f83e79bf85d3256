"""The connections of a server: how many there may be, and which one ends for the sake of another.

A connection is spare while it has no request: it is new, or waits for the next one, or its request's headers have not
all come. Nobody has proved anything by then, so strangers can hold these, and only these, for long. When there is one
connection too many, the one ends that has been spare longest; a client that comes to ask something is the last of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S: Final = 60.0


class Connection(Protocol):
    """One client's."""

    def end(self) -> None:
        """End it at once."""
        ...


class Connections:
    """Belongs to one event loop."""

    def __init__(self, max_connections: int, clock: Callable[[], float]) -> None:
        self._max_connections = max_connections
        self._clock = clock
        self._all: set[Connection] = set()
        self._spare: dict[Connection, None] = {}
        self._warn_s = clock()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> bool:
        """A client has connected. Returns whether there is room for it; if not, it does not count."""
        if len(self._all) >= self._max_connections:
            oldest = next(iter(self._spare), None)
            self._warn(is_refused=oldest is None)
            if oldest is None:
                return False
            self.discard(oldest)
            oldest.end()
        self._all.add(connection)
        self.set_spare(connection)
        return True

    def discard(self, connection: Connection) -> None:
        """It has ended."""
        self._all.discard(connection)
        self._spare.pop(connection, None)

    def set_spare(self, connection: Connection) -> None:
        """It has no request from now on."""
        if connection in self._all:
            self._spare.pop(connection, None)
            self._spare[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """It has a request from now on."""
        self._spare.pop(connection, None)

    def _warn(self, *, is_refused: bool) -> None:
        """Tell the operator, but not of each one."""
        now_s = self._clock()
        if now_s < self._warn_s:
            return
        self._warn_s = now_s + _WARNING_INTERVAL_S
        what = "new ones are refused" if is_refused else "those end that have waited longest for a request"
        logger.warning(
            "there are as many HTTP connections as there may be (ingress.http.max_connections): %s",
            what,
            extra={"max_connections": self._max_connections},
        )
