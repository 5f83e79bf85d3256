"""Strangers at a data link's sockets get nothing, and do not keep out who is meant."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kv_transfer.errors import LinkLost, Untrusted
from kv_transfer.transports.shared_memory import SharedMemoryLink
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.transports.tcp import _CONSUMER, _PRODUCER, _local_name
from kv_transfer.trust.callers import MAX_CALLERS
from kv_transfer.trust.handshake import Dialer
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import Purpose, SessionKey
from kv_transfer.trust.socket_handshake import dial_proof
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.transports.tcp_setup import tcp_transport

pytestmark = pytest.mark.usefixtures("patient_handshakes")

TIMEOUT_S = 60.0
KEY, OTHER_KEY = SessionKey(b"k" * 32), SessionKey(b"o" * 32)

# Another user of the host, who has read the name in /proc/net/unix.
NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(60)
connection.connect("\\0" + sys.argv[1])
print(len(socket.recv_fds(connection, 4096, 4)[1]), connection.recv(1) == b"")
"""


@pytest.mark.parametrize("knows", ["the rendezvous", "another key", "nothing"])
def test_who_does_not_know_the_streams_key_gets_no_descriptor(knows: str) -> None:
    pending = tcp_transport("127.0.0.1", allocate_shared_pool(LAYOUT)).listen(KEY)
    token = bytes.fromhex(pending.rendezvous.split("|")[2])
    with ThreadPoolExecutor(1) as thread, socket.socket(socket.AF_UNIX) as stranger:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        stranger.settimeout(TIMEOUT_S)
        stranger.connect(_local_name(token))
        if knows == "nothing":
            stranger.sendall(b"m" * 64)
        else:
            key = OTHER_KEY if knows == "another key" else SessionKey(token)
            dialer = Dialer(key, Purpose.SHARED_MEMORY, _CONSUMER, _PRODUCER, bound=token)
            with pytest.raises(Untrusted):
                dial_proof(stranger, dialer, time.monotonic() + TIMEOUT_S)
        stranger.shutdown(socket.SHUT_WR)
        fds: list[int] = []
        with contextlib.suppress(ConnectionResetError):
            _, fds, _, _ = socket.recv_fds(stranger, 4096, 4)
        assert fds == []
        consumer = tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=KEY)
        producer = accepting.result(TIMEOUT_S)
    assert isinstance(consumer, SharedMemoryLink)
    producer.close()
    consumer.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
def test_a_consumer_of_another_control_stream_is_refused(is_shared: bool) -> None:
    pool = allocate_shared_pool(LAYOUT) if is_shared else torch.zeros(LAYOUT.shape)
    pending = tcp_transport("127.0.0.1", pool).listen(KEY)
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        with pytest.raises(LinkLost, match="secret"):
            tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=OTHER_KEY)
        # The place is still free for the one that it is for.
        consumer = tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=KEY)
        producer = accepting.result(TIMEOUT_S)
    producer.close()
    consumer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_no_descriptor() -> None:
    pending = tcp_transport("127.0.0.1", allocate_shared_pool(LAYOUT)).listen(KEY)
    token = bytes.fromhex(pending.rendezvous.split("|")[2])
    assert token.hex() not in Path("/proc/net/unix").read_text(), "the list of sockets tells no token"
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        name = _local_name(token)[1:]
        told = subprocess.run(
            [sys.executable, "-c", NOBODY, name], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        assert told.stdout.split() == ["0", "True"]
        consumer = tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=KEY)
        producer = accepting.result(TIMEOUT_S)
    producer.close()
    consumer.close()


@pytest.mark.parametrize("said", [b"", b"\xff" * 64, b"\x00\x07raypd\x02\x01", b"m"], ids=repr)
@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
def test_more_strangers_than_are_heard_at_a_time_do_not_delay_the_consumer(is_shared: bool, said: bytes) -> None:
    """They came first, to both sockets, and none of them hangs up, nor has used up its time."""
    refusals = Refusals()
    pool = allocate_shared_pool(LAYOUT) if is_shared else torch.zeros(LAYOUT.shape)
    pending = tcp_transport("127.0.0.1", pool, refusals=refusals).listen(KEY)
    host, port, token = pending.rendezvous.split("|")
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as strangers:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        for _ in range(80):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said)
            if is_shared:
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(_local_name(bytes.fromhex(token)))
                stranger.sendall(said)
        begin_s = time.monotonic()
        consumer = tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=KEY)
        assert time.monotonic() - begin_s < TIMEOUT_S / 2, "no stranger was waited for"
        producer = accepting.result(TIMEOUT_S)
        assert isinstance(consumer, SharedMemoryLink) == is_shared
    assert refusals.total >= 80 - MAX_CALLERS
    producer.close()
    consumer.close()
