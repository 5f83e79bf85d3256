"""The opening of a link, which another thread may give up while the link's own thread waits for the peer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from kv_transfer.errors import LinkLost
from kv_transfer.trust.tls_socket import TlsSocket


class Opening:
    """The sockets on which the opening thread waits, and whether the link was given up.

    Any thread may call give_up(); the rest belongs to the opening thread.
    """

    def __init__(self) -> None:
        # give_up() must not shut down a descriptor that its owner has closed and the kernel has given to another file.
        self._lock = threading.Lock()
        self._is_given_up = False
        self._awaited: list[socket.socket | TlsSocket] = []

    def give_up(self) -> None:
        """Give the link up, and wake the opening thread wherever it waits. Does not block."""
        with self._lock:
            self._is_given_up = True
            for awaited in self._awaited:
                _wake(awaited)

    @contextlib.contextmanager
    def waking(self, awaited: socket.socket | TlsSocket) -> Iterator[None]:
        """Let give_up() end every wait on this socket while inside. The socket must not be closed inside.

        Raises LinkLost if the link was given up before.
        """
        with self._lock:
            self.check()
            self._awaited.append(awaited)
        try:
            yield
        finally:
            with self._lock:
                self._awaited.remove(awaited)

    def check(self) -> None:
        """Raise LinkLost if the link was given up."""
        if self._is_given_up:
            raise LinkLost("the link was closed while it was being opened")


def _wake(awaited: socket.socket | TlsSocket) -> None:
    # On Linux, shutdown() makes a listening socket readable, makes a connecting socket fail, and ends a connected
    # socket's stream.
    with contextlib.suppress(OSError):
        awaited.shutdown(socket.SHUT_RDWR)
