"""The connections of a server: how many there may be, and which one is ended when there are too many.

A connection is spare while it has no request: it is new, or waits for its next request, or has not received all headers
of one. A client needs no token for that, so strangers can keep spare connections, and only these, for long. When there
is one connection too many, the one that has been spare longest is ended. A new connection is the last of them, so that
its client has time to send a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S: Final = 60.0


class Connection(Protocol):
    """A connection of one client."""

    def end(self) -> None:
        """End the connection at once."""
        ...


class Connections:
    """The connections of one server. The object belongs to one event loop."""

    def __init__(self, max_connections: int, clock: Callable[[], float]) -> None:
        self._max_connections = max_connections
        self._clock = clock
        self._all: set[Connection] = set()
        self._spare: dict[Connection, None] = {}
        self._warn_s = clock()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> bool:
        """Add a new connection; returns whether there is room for it. If not, it is not added."""
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
        """Remove a connection that has ended."""
        self._all.discard(connection)
        self._spare.pop(connection, None)

    def set_spare(self, connection: Connection) -> None:
        """Note that a connection has no request from now on."""
        if connection in self._all:
            self._spare.pop(connection, None)
            self._spare[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Note that a connection has a request from now on."""
        self._spare.pop(connection, None)

    def _warn(self, *, is_refused: bool) -> None:
        """Log that there are too many connections, at most once a minute."""
        now_s = self._clock()
        if now_s < self._warn_s:
            return
        self._warn_s = now_s + _WARNING_INTERVAL_S
        what = "new connections are refused" if is_refused else "the connections that have been idle longest are closed"
        logger.warning(
            "the limit on HTTP connections (ingress.http.max_connections) is reached: %s",
            what,
            extra={"max_connections": self._max_connections},
        )
