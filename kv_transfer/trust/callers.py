"""Accepts connections to a process of the cluster, and lets each caller prove itself before it is handed out.

A caller is the other end of such a connection. Each caller proves itself on a thread of its own, a bounded number of
callers at a time. If one more comes, the caller that has taken longest is cut off: a member of the cluster proves
itself within milliseconds, so this caller is most likely a stranger. So strangers that hold connections open keep no
member out, however many they are. A member that was cut off calls again.

Invariant: a caller to which the welcome was sent is handed out, and is not cut off any more. A caller that has proven
itself and got no welcome yet may be cut off; it notices, because it waits for the welcome.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from kv_transfer.errors import HungUp
from kv_transfer.trust.tls_socket import TlsSocket

logger = logging.getLogger(__name__)

MAX_CALLERS: Final = 64
PROOF_TIMEOUT_S: Final = 5.0
"""How long a caller may take to prove itself, unless it is cut off earlier."""
BACKLOG: Final = 128
"""How many connections the kernel keeps for a listening socket until they are accepted."""
_WELCOME: Final = b"w"
_JOIN_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.02

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Caller(Generic[_T]):
    """A caller that has proven itself. stream: its connection; who: the facts that its proof has shown"""

    stream: socket.socket | TlsSocket
    who: _T


Prove = Callable[[socket.socket, str], Caller[_T] | None]
"""Lets a caller at this address prove itself, up to a deadline that the function sets itself.

To refuse the caller, it closes the connection and returns None.
"""


class Callers(Generic[_T]):
    """A context manager that accepts callers while it is entered. One thread calls take()."""

    def __init__(self, listeners: Mapping[socket.socket, Prove[_T]], max_callers: int = MAX_CALLERS) -> None:
        """listeners: listening sockets, each with the function that checks its callers; the owner closes the sockets

        max_callers: the most callers that prove themselves at a time
        """
        self._prove = dict(listeners)
        self._max_callers = max_callers
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._heard: dict[int, socket.socket] = {}
        """A second descriptor of each connection whose caller is proving itself; the oldest first."""
        self._threads: list[threading.Thread] = []
        """The threads of callers, also of those that were cut off; only the listener's thread changes the list."""
        self._proven: queue.SimpleQueue[Caller[_T] | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._is_over = False
        self._listener = threading.Thread(target=self._listen, name="callers", daemon=True)

    def __enter__(self) -> Self:
        self._listener.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut off every caller that was not handed out. No thread of this object touches a listener afterwards."""
        with self._lock:
            self._is_over = True
            for handle in self._heard.values():
                _cut(handle)
        self._wake.close()
        self._listener.join(_JOIN_TIMEOUT_S)
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        self._woken.close()
        with contextlib.suppress(queue.Empty):
            while True:
                if (caller := self._proven.get_nowait()) is not None:
                    caller.stream.close()

    def take(self, deadline_s: float) -> Caller[_T] | None:
        """Wait for the next caller that has proven itself, and return it; None if a listener was shut down.

        deadline_s: monotonic. Raises TimeoutError when it has passed.
        """
        try:
            return self._proven.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("no caller has proven in time that it is a member") from None

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._prove:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_over:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is not self._woken and not self._accept(key.fileobj):
                        self._proven.put(None)
                        return

    def _accept(self, listener: socket.socket) -> bool:
        """Accept a caller and start its proof; return False if the listener accepts no connection any more."""
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            logger.debug("a connection cannot be accepted", extra={"reason": str(error)})
            with self._lock:
                self._cut_oldest()  # If this process has no descriptors left, this frees two of them.
            time.sleep(_PAUSE_S)
            # These two errors mean that the listener was shut down or closed.
            return error.errno not in {errno.EINVAL, errno.EBADF}
        connection.setblocking(True)
        host = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
        try:
            self._begin(connection, host, self._prove[listener])
        except (OSError, RuntimeError) as error:
            logger.debug("cannot start the authentication of a caller", extra={"reason": str(error)})
            connection.close()
        return True

    def _begin(self, connection: socket.socket, address: str, prove: Prove[_T]) -> None:
        """Start a caller's thread. Raises OSError or RuntimeError if no descriptor, or no thread, is left."""
        number = next(self._numbers)
        thread = threading.Thread(target=self._hear, args=(number, connection, address, prove), daemon=True)
        handle = connection.dup()
        with self._lock:
            if len(self._heard) >= self._max_callers:
                self._cut_oldest()
            self._heard[number] = handle
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._heard.pop(number, handle)
            handle.close()
            raise
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _cut_oldest(self) -> None:
        """Cut off the caller whose proof has taken longest, if there is one; the lock is held."""
        if self._heard:
            handle = self._heard.pop(next(iter(self._heard)))
            _cut(handle)
            handle.close()

    def _hear(self, number: int, connection: socket.socket, address: str, prove: Prove[_T]) -> None:
        caller = None
        try:
            caller = prove(connection, address)
        finally:
            with self._lock:
                handle = self._heard.pop(number, None)
                is_cut = handle is None or self._is_over
            if handle is not None:
                handle.close()
            if caller is not None:
                self._hand_out(caller, is_cut=is_cut)

    def _hand_out(self, caller: Caller[_T], *, is_cut: bool) -> None:
        try:
            if is_cut:
                raise ConnectionAbortedError("it was cut to make room for newer callers")
            caller.stream.sendall(_WELCOME)
        except OSError as error:
            logger.debug("a caller's connection ended before the caller was accepted", extra={"reason": str(error)})
            caller.stream.close()
        else:
            self._proven.put(caller)


def wait_welcome(stream: socket.socket | TlsSocket, deadline_s: float) -> None:
    """Wait for the other end's welcome, as a caller that has proven itself.

    deadline_s: monotonic. Raises HungUp if the welcome does not come.
    """
    timeout_s = stream.gettimeout()
    try:
        stream.settimeout(max(0.001, deadline_s - time.monotonic()))
        if stream.recv(len(_WELCOME)) != _WELCOME:
            raise HungUp("the other end closed the connection instead of sending a welcome")
    except TimeoutError:
        raise HungUp("the other end sent no welcome in time") from None
    except OSError as error:
        raise HungUp(f"the other end closed the connection instead of sending a welcome: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            stream.settimeout(timeout_s)


def _cut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
