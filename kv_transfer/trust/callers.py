"""Hears those who connect to a process of the cluster, before they have proven anything.

Each caller is heard on a thread of its own, a bounded number at a time. If one more comes, the caller that has been
heard for the longest is cut off: a member of the cluster proves itself within milliseconds, and who has said nothing
for longer is most likely a stranger. So strangers who hold connections open keep nobody out, however many they are. A
member that was cut off calls again.

Invariant: a caller that was told that it is welcome is handed out, and is not cut off any more. A caller that has
proven itself and was not told may be cut off; it notices, because it waits to be told.
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
"""Connections that the kernel keeps for a listener here, until they are taken."""
_WELCOME: Final = b"w"
_JOIN_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.02

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Caller(Generic[_T]):
    """A caller that has proven itself. who: what its proof says."""

    stream: socket.socket | TlsSocket
    who: _T


Prove = Callable[[socket.socket, str], Caller[_T] | None]
"""Hears a caller, at this address, up to a deadline of its own. Closes the connection and returns None to refuse it."""


class Callers(Generic[_T]):
    """A context manager: callers are heard while inside. take() belongs to one thread."""

    def __init__(self, listeners: Mapping[socket.socket, Prove[_T]], max_callers: int = MAX_CALLERS) -> None:
        """listeners: sockets that listen, each with what is to be proven there; they stay their owner's."""
        self._prove = dict(listeners)
        self._max_callers = max_callers
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._heard: dict[int, socket.socket] = {}
        """Descriptors of their own of the connections that are heard; the oldest first."""
        self._threads: dict[int, threading.Thread] = {}
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
        """Cut off everybody who was not handed out. No thread of this object touches a listener afterwards."""
        with self._lock:
            self._is_over = True
            for handle in self._heard.values():
                _cut(handle)
        self._wake.close()
        self._listener.join(_JOIN_TIMEOUT_S)
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(_JOIN_TIMEOUT_S)
        self._woken.close()
        with contextlib.suppress(queue.Empty):
            while True:
                if (caller := self._proven.get_nowait()) is not None:
                    caller.stream.close()

    def take(self, deadline_s: float) -> Caller[_T] | None:
        """Wait for the next caller that has proven itself; None if a listener was shut down.

        deadline_s: monotonic. Raises TimeoutError.
        """
        try:
            return self._proven.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("nobody has called and proven to be a member in time") from None

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
        """Begin to hear a caller; returns False if nobody can call here any more."""
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            logger.debug("a caller cannot be heard", extra={"reason": str(error)})
            with self._lock:
                self._cut_oldest()  # If this process is out of descriptors, that frees two.
            time.sleep(_PAUSE_S)
            return error.errno not in {errno.EINVAL, errno.EBADF}  # A listener that was shut down, or closed.
        connection.setblocking(True)
        host = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
        try:
            self._begin(connection, host, self._prove[listener])
        except (OSError, RuntimeError) as error:
            logger.debug("a caller cannot be heard", extra={"reason": str(error)})
            connection.close()
        return True

    def _begin(self, connection: socket.socket, address: str, prove: Prove[_T]) -> None:
        """Raises OSError or RuntimeError if there are no descriptors, or no threads, left."""
        number = next(self._numbers)
        thread = threading.Thread(target=self._hear, args=(number, connection, address, prove), daemon=True)
        handle = connection.dup()
        with self._lock:
            if len(self._heard) >= self._max_callers:
                self._cut_oldest()
            self._heard[number] = handle
            self._threads[number] = thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._heard.pop(number, handle)
                del self._threads[number]
            handle.close()
            raise

    def _cut_oldest(self) -> None:
        """Hang up on the caller that has been heard for the longest, if there is one; under the lock."""
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
                del self._threads[number]
                is_cut = handle is None or self._is_over
            if handle is not None:
                handle.close()
            if caller is not None:
                self._hand_out(caller, is_cut=is_cut)

    def _hand_out(self, caller: Caller[_T], *, is_cut: bool) -> None:
        try:
            if is_cut:
                raise ConnectionAbortedError("another caller has taken its place")
            caller.stream.sendall(_WELCOME)
        except OSError as error:
            logger.debug("a caller left before it was welcome", extra={"reason": str(error)})
            caller.stream.close()
        else:
            self._proven.put(caller)


def wait_welcome(stream: socket.socket | TlsSocket, deadline_s: float) -> None:
    """Wait, as a caller that has proven itself, until the other end says that this one is welcome. Raises HungUp."""
    timeout_s = stream.gettimeout()
    try:
        stream.settimeout(max(0.001, deadline_s - time.monotonic()))
        if stream.recv(len(_WELCOME)) != _WELCOME:
            raise HungUp("it hung up instead of a welcome")
    except TimeoutError:
        raise HungUp("it did not say in time that this end is welcome") from None
    except OSError as error:
        raise HungUp(f"it hung up instead of a welcome: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            stream.settimeout(timeout_s)


def _cut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
