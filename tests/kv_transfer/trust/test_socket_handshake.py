"""The handshake over sockets: bounded in bytes and in time, and nothing beyond it is read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kv_transfer.errors import NotRaypd, OtherProtocol, Untrusted, WrongSecret
from kv_transfer.trust.handshake import PROTOCOL_VERSION, Acceptor, Dialer, Party, Proven
from kv_transfer.trust.secret import ClusterSecrets, KeySource, Purpose
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof

SECRETS = ClusterSecrets.draw()
CONSUMER, PRODUCER = Party("decode-0", 1), Party("prefill-0", 2)
TIMEOUT_S = 60.0


class Ends:
    """Two connected sockets, and the acceptor's end of the handshake on a thread."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self._threads = ThreadPoolExecutor(1)

    def accept(self, secrets: KeySource = SECRETS, timeout_s: float = TIMEOUT_S) -> Future[Proven]:
        acceptor = Acceptor(secrets, Purpose.DATA_LINK, PRODUCER)
        return self._threads.submit(accept_proof, self.far, acceptor, time.monotonic() + timeout_s)

    def dial(self, secrets: KeySource = SECRETS, timeout_s: float = TIMEOUT_S) -> Proven:
        dialer = Dialer(secrets, Purpose.DATA_LINK, CONSUMER, PRODUCER)
        return dial_proof(self.near, dialer, time.monotonic() + timeout_s)

    def close(self) -> None:
        self.near.close()
        self._threads.shutdown()
        self.far.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_both_ends_are_proven_and_what_follows_is_left_in_the_socket(ends: Ends) -> None:
    ends.far.settimeout(3.5)
    accepting = ends.accept()
    at_dialer = ends.dial()
    ends.near.sendall(b"the first bytes of a chunk")
    at_acceptor = accepting.result(TIMEOUT_S)
    assert at_acceptor.dialer == CONSUMER
    assert at_acceptor.session_key.tag(b"") == at_dialer.session_key.tag(b"")
    assert ends.far.recv(100) == b"the first bytes of a chunk"
    assert ends.far.gettimeout() == 3.5
    assert ends.near.gettimeout() is None


def test_a_stranger_who_listens_gets_no_proof_and_one_who_dials_is_refused(ends: Ends) -> None:
    accepting = ends.accept(ClusterSecrets.draw())
    with pytest.raises(WrongSecret):
        ends.dial()
    ends.near.close()
    with pytest.raises(Untrusted):
        accepting.result(TIMEOUT_S)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff", bytes(5000), b"\x00\x07raypd" + bytes([PROTOCOL_VERSION, 1])]
)
def test_whoever_says_something_else_is_refused(ends: Ends, noise: bytes) -> None:
    accepting = ends.accept()
    ends.near.sendall(noise)
    ends.near.shutdown(socket.SHUT_WR)
    with pytest.raises(NotRaypd):
        accepting.result(TIMEOUT_S)


def test_whoever_says_nothing_is_refused_at_the_deadline(ends: Ends) -> None:
    accepting = ends.accept(timeout_s=0.05)
    with pytest.raises(NotRaypd, match="in time"):
        accepting.result(TIMEOUT_S)


def test_one_byte_at_a_time_does_not_move_the_deadline(ends: Ends) -> None:
    accepting = ends.accept(timeout_s=0.3)
    ends.near.sendall(b"\x00\xff")
    while not accepting.done():
        ends.near.sendall(b"r")
        time.sleep(0.02)
    with pytest.raises(NotRaypd):
        accepting.result(TIMEOUT_S)


def test_whoever_hangs_up_is_refused(ends: Ends) -> None:
    accepting = ends.accept()
    ends.near.close()
    with pytest.raises(NotRaypd, match="closed the connection"):
        accepting.result(TIMEOUT_S)


def test_another_version_gets_a_refusal_that_tells_this_one(ends: Ends) -> None:
    accepting = ends.accept()
    challenge = bytearray(Dialer(SECRETS, Purpose.DATA_LINK, CONSUMER, PRODUCER).challenge)
    challenge[5] = 9
    ends.near.sendall(len(challenge).to_bytes(2, "big") + challenge)
    with pytest.raises(
        OtherProtocol, match=f"handshake protocol 9 and is a newer raypd: this process speaks {PROTOCOL_VERSION}"
    ):
        accepting.result(TIMEOUT_S)
    assert ends.near.recv(100) == b"\x00\x07raypd" + bytes([PROTOCOL_VERSION, 4])
