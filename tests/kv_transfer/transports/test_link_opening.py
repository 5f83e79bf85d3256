"""A link that is given up while it comes up does not wait for a peer that does not come, or does not answer."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from kv_transfer.errors import LinkLost
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.link_opening import Opening
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.transports.tcp import _listen_locally
from kv_transfer.trust.tls_socket import TlsSocket
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.transports.tcp_setup import tcp_transport

LONG_S = 90.0
SOON_S = 45.0
HOST = "127.0.0.1"
TOKEN = secrets.token_bytes(16)


class WatchedOpening(Opening):
    """Says which sockets are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: queue.SimpleQueue[socket.socket | TlsSocket] = queue.SimpleQueue()

    @contextlib.contextmanager
    def waking(self, awaited: socket.socket | TlsSocket) -> Iterator[None]:
        with super().waking(awaited):
            self.awaited.put(awaited)
            yield


def assert_given_up(wait: Callable[[Opening], DataLink], num_sockets: int) -> None:
    """Gives up when the opening thread has begun to wait for so many sockets. No descriptor is left."""
    num_fds = psutil.Process().num_fds()
    opening = WatchedOpening()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait, opening)
        for _ in range(num_sockets):
            opening.awaited.get(timeout=LONG_S)
        start_s = time.monotonic()
        opening.give_up()
        assert isinstance(waiting.exception(LONG_S), LinkLost)
        assert time.monotonic() - start_s < SOON_S
    limit_s = time.monotonic() + SOON_S
    while psutil.Process().num_fds() > num_fds:
        assert time.monotonic() < limit_s, "a descriptor is left"
        time.sleep(0.01)


@contextlib.contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """An address that answers no more SYNs, as a host behind a broken network does."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            connection = sockets.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_nobody_connects() -> None:
    for pool in (torch.zeros(LAYOUT.shape), allocate_shared_pool(LAYOUT)):
        pending = tcp_transport(HOST, pool).listen()
        assert_given_up(lambda opening, pending=pending: pending.accept(LONG_S, opening), 1)  # type: ignore[misc]  # bound


def test_a_stranger_connects_and_says_nothing() -> None:
    pending = tcp_transport(HOST, torch.zeros(LAYOUT.shape)).listen()
    host, port, _ = pending.rendezvous.split("|")
    with socket.create_connection((host, int(port))):
        assert_given_up(lambda opening: pending.accept(LONG_S, opening), 1)


def test_no_packet_comes_back() -> None:
    with full_listener() as (host, port):
        rendezvous = f"{host}|{port}|{TOKEN.hex()}"
        assert_given_up(
            lambda opening: tcp_transport(host, torch.zeros(1)).connect(rendezvous, LONG_S, opening),
            2,
        )


def test_a_producer_on_this_host_does_not_answer() -> None:
    listener = _listen_locally(TOKEN)
    assert listener is not None
    with listener, full_listener() as (host, port):
        rendezvous = f"{host}|{port}|{TOKEN.hex()}"
        assert_given_up(
            lambda opening: tcp_transport(host, torch.zeros(1)).connect(rendezvous, LONG_S, opening),
            1,
        )


def test_a_link_that_was_given_up_before_does_not_begin() -> None:
    opening = Opening()
    opening.give_up()
    with pytest.raises(LinkLost, match="closed while it was being opened"):
        tcp_transport(HOST, torch.zeros(1)).listen().accept(LONG_S, opening)
    with full_listener() as (host, port), pytest.raises(LinkLost, match="closed while it was being opened"):
        tcp_transport(host, torch.zeros(1)).connect(f"{host}|{port}|{TOKEN.hex()}", LONG_S, opening)


class DeathWatch:
    """Records the last words of a data thread."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_chunk_moved(self, job: ChunkJob) -> None:
        raise AssertionError("there is none")

    def on_dead(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a_data_thread_that_is_aborted_while_its_link_comes_up_ends() -> None:
    pending, events = tcp_transport(HOST, torch.zeros(1)).listen(), DeathWatch()
    data = DataThread(
        "test", lambda opening: pending.accept(LONG_S, opening), events, is_sender=True, chunk_timeout_s=LONG_S
    )
    data.abort()
    assert data.join(SOON_S)
    assert events.reasons == ["the link was closed while it was being opened"]
