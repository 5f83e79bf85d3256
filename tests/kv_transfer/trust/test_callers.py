"""Members get in, however many strangers call beside them and whatever these say or do not say."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from kv_transfer.errors import HungUp, Untrusted
from kv_transfer.trust.callers import Caller, Callers, wait_welcome
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.secret import Purpose
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof
from tests.trusted import TRUST

TIMEOUT_S = 60.0
OWN = Party("engine-0", 1)


class Listening:
    """A listener where members of the cluster prove themselves."""

    def __init__(self, opened: ExitStack, max_callers: int = 4) -> None:
        self.server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        self.callers = opened.enter_context(Callers({self.server: self._prove}, max_callers))
        self.refused: list[Untrusted] = []
        self.has_refused = threading.Semaphore(0)

    def dial(self) -> socket.socket:
        return socket.create_connection(self.server.getsockname(), TIMEOUT_S)

    def call(self, name: str) -> socket.socket:
        """Connect as a member does: again, if it is cut off."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            connection = self.dial()
            try:
                dial_proof(connection, Dialer(TRUST, Purpose.RANK, Party(name, 1), OWN), deadline_s)
                wait_welcome(connection, deadline_s)
            except HungUp:
                connection.close()
            else:
                return connection

    def take(self) -> Caller[str]:
        caller = self.callers.take(time.monotonic() + TIMEOUT_S)
        assert caller is not None
        return caller

    def _prove(self, connection: socket.socket, address: str) -> Caller[str] | None:
        assert address.startswith("127.0.0.1:")
        try:
            acceptor = Acceptor(TRUST, Purpose.RANK, OWN)
            proven = accept_proof(connection, acceptor, time.monotonic() + TIMEOUT_S)
        except Untrusted as error:
            self.refused.append(error)
            self.has_refused.release()
            connection.close()
            return None
        return Caller(connection, proven.dialer.name)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    num_fds, num_threads = psutil.Process().num_fds(), threading.active_count()
    with ExitStack() as stack:
        yield stack
    # An earlier test's sockets may be closed meanwhile.
    limit_s = time.monotonic() + TIMEOUT_S
    while psutil.Process().num_fds() > num_fds or threading.active_count() > num_threads:
        assert time.monotonic() < limit_s, "something is left"
        time.sleep(0.01)


def test_members_are_handed_out_with_what_they_have_proven(opened: ExitStack) -> None:
    listening = Listening(opened)
    for name in ("a", "b"):
        with listening.call(name) as connection:
            caller = listening.take()
            assert caller.who == name
            caller.stream.sendall(b"hello")
            assert connection.recv(5) == b"hello"
            caller.stream.close()


def test_silent_strangers_in_every_place_keep_no_member_out(opened: ExitStack) -> None:
    listening = Listening(opened)
    for _ in range(20):
        opened.enter_context(listening.dial())
    begin_s = time.monotonic()
    with listening.call("a"):
        caller = listening.take()
        assert caller.who == "a"
        assert time.monotonic() - begin_s < TIMEOUT_S / 2, "strangers have TIMEOUT_S to prove themselves"
        caller.stream.close()


def test_the_oldest_stranger_is_cut_off_for_a_new_caller(opened: ExitStack) -> None:
    listening = Listening(opened, max_callers=2)
    first, second = (opened.enter_context(listening.dial()) for _ in range(2))
    with listening.call("a"):
        listening.take().stream.close()
    assert first.recv(1) == b"", "it was cut off"
    second.setblocking(False)
    with pytest.raises(BlockingIOError):
        second.recv(1)


def test_members_get_in_while_strangers_go_on_calling(opened: ExitStack) -> None:
    """Each stranger that is cut off calls again at once, as a member does."""
    listening, is_over = Listening(opened), threading.Event()

    def intrude() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), listening.dial() as connection:
                connection.settimeout(1.0)  # Nobody answers a connection that is made while the listener closes.
                connection.recv(1)

    strangers = [threading.Thread(target=intrude) for _ in range(8)]
    for stranger in strangers:
        stranger.start()
    try:
        for number in range(5):
            with listening.call(f"rank-{number}"):
                caller = listening.take()
                assert caller.who == f"rank-{number}"
                caller.stream.close()
    finally:
        is_over.set()
        opened.close()
        for stranger in strangers:
            stranger.join(TIMEOUT_S)


@pytest.mark.parametrize(
    "said", [b"\xff" * 64, b"\x00\x00", b"\x10\x00raypd", b"\x00\x40raypd\x02\x01", b"x"], ids=repr
)
def test_nonsense_is_refused_and_the_next_member_gets_in(said: bytes, opened: ExitStack) -> None:
    listening = Listening(opened)
    with listening.dial() as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert listening.has_refused.acquire(timeout=TIMEOUT_S)
    with listening.call("a"):
        listening.take().stream.close()


def test_a_listener_that_was_shut_down_ends_the_wait(opened: ExitStack) -> None:
    listening = Listening(opened)
    listening.server.shutdown(socket.SHUT_RDWR)
    assert listening.callers.take(time.monotonic() + TIMEOUT_S) is None


def test_nobody_is_waited_for_beyond_the_deadline(opened: ExitStack) -> None:
    listening = Listening(opened)
    opened.enter_context(listening.dial())
    with pytest.raises(TimeoutError):
        listening.callers.take(time.monotonic() + 0.05)


def test_a_member_that_nobody_took_hears_of_the_end(opened: ExitStack) -> None:
    listening = Listening(opened)
    with listening.call("a") as member:
        opened.close()
        assert member.recv(1) == b""


def test_a_member_that_is_handed_out_while_all_ends_hears_of_the_end(opened: ExitStack) -> None:
    is_welcomed, may_go_on = threading.Event(), threading.Event()
    member, accepted = (opened.enter_context(end) for end in socket.socketpair())

    class Slow(socket.socket):
        def sendall(self, data: Any, flags: int = 0, /) -> None:
            is_welcomed.set()
            assert may_go_on.wait(TIMEOUT_S)
            super().sendall(data, flags)

    def prove(connection: socket.socket, address: str) -> Caller[str]:
        connection.close()
        return Caller(Slow(fileno=accepted.detach()), "a")

    server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    callers = opened.enter_context(ExitStack())
    callers.enter_context(Callers({server: prove}))
    opened.enter_context(socket.create_connection(server.getsockname(), TIMEOUT_S))
    assert is_welcomed.wait(TIMEOUT_S)
    closer = threading.Thread(target=callers.close)
    closer.start()
    closer.join(0.1)
    may_go_on.set()
    closer.join(TIMEOUT_S)
    member.settimeout(TIMEOUT_S)
    assert [member.recv(1), member.recv(1)] == [b"w", b""]
