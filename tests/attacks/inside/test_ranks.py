"""Bytes on a rank's connection that are no message end that engine's start or step with a reason, never a process.

Nothing is allocated because somebody announces it.
"""

from __future__ import annotations

import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from actors.model.errors import RankLost
from actors.model.tensor_parallel.mesh import RankAddress, RankAddresses, decode_address, decode_addresses
from actors.ranks.rank_messages import CODEC, RankConnection
from kv_transfer.message_ranges import MALFORMED
from tests.attacks.inside.message_fuzzer import MessageFuzzer

NUM_FRAMES = {"short": 60, "long": 5000}
TIMEOUT_S = 60.0


@contextmanager
def connected() -> Iterator[tuple[RankConnection, socket.socket]]:
    """A connection whose ends have proven themselves, and its far end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), TIMEOUT_S)
        far, _ = server.accept()
    with far, closing(RankConnection(near, TIMEOUT_S)) as connection:
        yield connection, far


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", range(len(CODEC.types)), ids=[type_.__name__ for type_ in CODEC.types])
def test_a_frame_of_a_rank_is_a_message_or_a_lost_rank(kind: int, size: str) -> None:
    fuzzer, lost, received = MessageFuzzer(CODEC.types[kind], kind, {}), 0, 0
    for _ in range(NUM_FRAMES[size]):
        frame = bytes((kind,)) + fuzzer.make_hostile()
        with connected() as (connection, far):
            far.sendall(struct.pack("!Q", len(frame)) + frame)
            try:
                assert isinstance(connection.receive(), CODEC.types)
                received += 1
            except RankLost as error:
                lost += "it sent a malformed message" in str(error)
    assert lost + received == NUM_FRAMES[size]
    assert lost > 0
    assert received > 0


@pytest.mark.parametrize("said", [b"\xff" * 8, struct.pack("!Q", 2**30 + 1), struct.pack("!Q", 2**30) + b"x" * 100])
def test_what_is_said_to_come_is_not_allocated_before_it_comes(said: bytes) -> None:
    with connected() as (connection, far):
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            with pytest.raises(RankLost):
                connection.receive()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize(("type_", "decode"), [(RankAddress, decode_address), (RankAddresses, decode_addresses)])
def test_an_address_of_a_rank_is_one_or_is_refused(type_: Any, decode: Any) -> None:
    fuzzer, draw, num_refused = MessageFuzzer(type_, 1, {}), random.Random(1), 0
    for _ in range(2000):
        frame = fuzzer.make_hostile() if draw.random() < 0.9 else draw.randbytes(40)
        try:
            decode(frame)
        except MALFORMED:
            num_refused += 1
    assert num_refused > 100
