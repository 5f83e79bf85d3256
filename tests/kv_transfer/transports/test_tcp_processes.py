"""Links between two real processes, one of which is killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.shared_pool import allocate_shared_pool
from tests.fork_server import fork_server
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.transports.tcp_setup import tcp_transport

pytestmark = pytest.mark.usefixtures("patient_handshakes")

TIMEOUT_S = 60.0


def produce(consumer: Connection, is_shared: bool) -> None:
    """Send block 1 for each word, and say how it went."""
    pool = allocate_shared_pool(LAYOUT) if is_shared else torch.zeros(LAYOUT.shape)
    pool[1] = 5.0
    pending = tcp_transport("127.0.0.1", pool).listen()
    consumer.send(pending.rendezvous)
    link = pending.accept(TIMEOUT_S)
    while consumer.recv():
        try:
            link.send([pool[1]], TIMEOUT_S)
        except LinkLost:
            consumer.send("lost")
        else:
            consumer.send("sent")


@contextmanager
def producing(is_shared: bool) -> Iterator[tuple[int, Connection, DataLink]]:
    """The producer's process id, words with it, and the consumer's end. One chunk has gone through."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs, is_shared), daemon=True)
    process.start()
    theirs.close()
    try:
        link = tcp_transport("127.0.0.1", torch.zeros(1)).connect(ours.recv(), TIMEOUT_S)
        target = torch.zeros(LAYOUT.shape[1:])
        ours.send(True)
        link.receive([target], TIMEOUT_S)
        assert ours.recv() == "sent"
        assert bool((target == 5.0).all())
        assert process.pid is not None
        yield process.pid, ours, link
        link.close()
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        process.close()
        ours.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
def test_a_killed_producer_is_noticed_at_once(is_shared: bool) -> None:
    with producing(is_shared) as (pid, _, link):
        os.kill(pid, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(LinkLost) as lost:
            link.receive([torch.zeros(LAYOUT.shape[1:])], TIMEOUT_S)
        assert lost.type is LinkLost, "not by its deadline"
        assert time.monotonic() - start_s < TIMEOUT_S / 2


def test_a_producer_that_was_stopped_past_the_deadline_finds_the_link_ended() -> None:
    with producing(is_shared=True) as (pid, words, link):
        os.kill(pid, signal.SIGSTOP)
        words.send(True)
        with pytest.raises(ChunkTimeout):
            link.receive([torch.zeros(LAYOUT.shape[1:])], 0.05)
        link.close()
        os.kill(pid, signal.SIGCONT)
        assert words.poll(TIMEOUT_S)
        assert words.recv() == "lost"
