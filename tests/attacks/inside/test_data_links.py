"""Bytes from a proven end of a data link that are no chunk end that link, and touch nothing; the next link works."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kv_transfer.errors import LinkLost, Untrusted
from kv_transfer.transports.base import DataLink
from kv_transfer.transports.shared_memory import SharedMemoryLink
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.transports.tcp_link import TcpLink
from kv_transfer.trust import handshake
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.secret import Purpose, SessionKey
from tests.attacks.inside.message_fuzzer import MessageFuzzer
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.transports.tcp_setup import tcp_transport
from tests.trusted import TRUST

KEY = SessionKey(b"k" * 32)
TIMEOUT_S = 60.0
SHORT_S = 0.3
BLOCK_BYTES = LAYOUT.block_size_bytes
NUM_LINKS = {"short": 15, "long": 400}


@contextmanager
def opened_link(pool: Tensor) -> Iterator[tuple[DataLink, DataLink]]:
    """The producer's end and the consumer's."""
    pending = tcp_transport("127.0.0.1", pool).listen(KEY)
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(pending.accept, TIMEOUT_S)
        consumer = tcp_transport("127.0.0.1", torch.zeros(1)).connect(pending.rendezvous, TIMEOUT_S, key=KEY)
        producer = accepting.result(TIMEOUT_S)
    try:
        yield producer, consumer
    finally:
        producer.close()
        consumer.close()


def say(link: DataLink, frame: bytes) -> None:
    assert isinstance(link, TcpLink | SharedMemoryLink)
    link._stream.send([memoryview(frame)], time.monotonic() + TIMEOUT_S)


def hostile_tcp_frames(draw: random.Random) -> bytes:
    """A chunk's header of another chunk, or of another size, or nonsense."""
    number, size = draw.choice((0, 1, 2, 2**64 - 1)), draw.choice((0, 1, BLOCK_BYTES, 2**63, 2**64 - 1))
    header = struct.pack("!4sQQ", draw.choice((b"rpkv", b"RPKV")), number, size)
    if header == struct.pack("!4sQQ", b"rpkv", 1, BLOCK_BYTES):
        header = header[:-1]  # The right one, and not all of it.
    return draw.choice((header, header[: draw.randrange(20)], draw.randbytes(40)))


def hostile_local_frames(draw: random.Random) -> bytes:
    """Blocks that are named, and lie outside of the pool or have another size; or another header; or nonsense."""
    pool_bytes = BLOCK_BYTES * LAYOUT.num_blocks
    begin = draw.choice((-1, -(2**63), 2**63 - 1, 2**63 - BLOCK_BYTES, pool_bytes, pool_bytes - BLOCK_BYTES + 1))
    named = struct.pack("!QQ?", 1, 1, True) + struct.pack("=qq", begin, BLOCK_BYTES)
    sized = struct.pack("!QQ?", 1, 1, True) + struct.pack("=qq", 0, draw.choice((0, -1, 1, BLOCK_BYTES + 1, 2**63 - 1)))
    counted = struct.pack("!QQ?", draw.choice((0, 2, 2**64 - 1)), draw.choice((0, 1, 2**64 - 1)), True) + bytes(16)
    return draw.choice((named, sized, counted, named[:10], b"\xff" * 40))


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_shared", [False, True], ids=["tcp", "shared memory"])
def test_a_producer_that_sends_no_chunk_loses_its_link_and_changes_no_block(is_shared: bool, size: str) -> None:
    pool = allocate_shared_pool(LAYOUT) if is_shared else torch.zeros(LAYOUT.shape)
    pool.copy_(torch.ones(LAYOUT.shape))
    draw = random.Random(1)
    for _ in range(NUM_LINKS[size]):
        target = torch.zeros_like(pool[:1])
        with opened_link(pool) as (producer, consumer):
            assert isinstance(producer, SharedMemoryLink) == is_shared
            say(producer, (hostile_local_frames if is_shared else hostile_tcp_frames)(draw))
            with pytest.raises(LinkLost):
                consumer.receive([target[0]], SHORT_S)
        assert not target.any()
    with opened_link(pool) as (producer, consumer), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(producer.send, [pool[3]], TIMEOUT_S)
        consumer.receive([target[0]], TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert target.all()


def test_a_consumer_that_acknowledges_with_something_else_loses_its_link() -> None:
    pool = allocate_shared_pool(LAYOUT)
    with opened_link(pool) as (producer, consumer):
        say(consumer, b"b")
        with pytest.raises(LinkLost, match="instead of a chunk's acknowledgement"):
            producer.send([pool[3]], TIMEOUT_S)


@pytest.mark.parametrize("is_dialer", [True, False], ids=["challenge", "answer"])
def test_a_handshake_is_refused_whatever_a_stranger_says_in_it(is_dialer: bool) -> None:
    own, peer = Party("a", 1), Party("b", 1)
    type_, kind = (handshake._Challenge, 1) if is_dialer else (handshake._Answer, 2)
    known = {"purpose": lambda draw: draw.choice(("data link", "session")), "nonce": lambda draw: draw.randbytes(32)}
    fuzzer, proofs = MessageFuzzer(type_, 1, known), MessageFuzzer(handshake._Proof, 2, {})
    num_answered = 0
    for _ in range(3000):
        frame = b"raypd" + bytes((handshake.PROTOCOL_VERSION, kind)) + fuzzer.make_hostile()
        try:
            if is_dialer:
                acceptor = Acceptor(TRUST, Purpose.DATA_LINK, own)
                assert len(acceptor.answer(frame)) <= handshake.MAX_MESSAGE_BYTES
                num_answered += 1
                acceptor.verify(b"raypd" + bytes((handshake.PROTOCOL_VERSION, 3)) + proofs.make_hostile())
            else:
                Dialer(TRUST, Purpose.DATA_LINK, peer, own).prove(frame)
        except Untrusted:
            continue
        raise AssertionError(f"nobody is proven by {frame!r}")
    assert (num_answered > 100) == is_dialer, "some are challenges"
