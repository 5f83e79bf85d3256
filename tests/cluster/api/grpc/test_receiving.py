"""Nothing of a call is received before its token was looked at, and no message without a bound.

Tests of cluster/api/grpc/wire.py.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from cluster.access.access_control import AccessControl
from cluster.api.grpc.wire import MAX_ENTRIES, MAX_NUMBERS, decode_in_slices
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.errors import InvalidRequest
from tests.attacks.raw_http2 import Connection, call_headers, frame, message_head
from tests.attacks.target import Target
from tests.attacks.wire import empties, inside
from tests.cluster.api.grpc.answering import methods
from tests.cluster.api.grpc.test_access import ALICE, access, started
from tests.cluster.serving_setup import grpc_settings

GENERATE_METHOD = next(method for method in methods() if method.name == "Generate")
GENERATE = "/raypd.v1.GenerateService/Generate"
HEALTH = "/grpc.health.v1.Health/Check"
MIB = 2**20
WINDOW = 65_535


async def taken_of_an_endless_message(address: str, path: str, token: str = "") -> int:
    """Bytes that a server takes of a message of 15 MiB, whose last byte never comes."""
    connection = await Connection.open(Target(int(address.rpartition(":")[2]), 0, "", ""))
    stream = connection.begin(path, token)
    num_sent = await connection.send(stream, message_head(15 * MIB + 1) + b"\0" * (15 * MIB), timeout_s=3.0)
    await connection.close()
    return num_sent


@pytest.mark.parametrize("path", [GENERATE, "/raypd.v1.ModelService/Tokenize", "/raypd.v1.AdminService/Drain"])
async def test_without_a_token_a_call_is_over_before_its_message_is_received(path: str, tmp_path: Path) -> None:
    async with started(grpc_settings(access=access(tmp_path / "tokens"))) as (address, _):
        for token in ("", "raypd-wrong"):
            assert await taken_of_an_endless_message(address, path, token) <= 2 * WINDOW
        if "Admin" in path:
            assert await taken_of_an_endless_message(address, path, ALICE) <= 2 * WINDOW


async def test_who_may_call_is_received_eight_messages_at_once() -> None:
    access_control = AccessControl()
    async with started(grpc_settings(access=access_control)) as (address, _):
        connection = await Connection.open(Target(int(address.rpartition(":")[2]), 0, "", ""))
        messages = message_head(MIB + 1) + b"\0" * MIB
        taken = {connection.begin(GENERATE): 0 for _ in range(12)}

        async def send_the_rest(stream: int) -> None:
            taken[stream] += await connection.send(stream, messages[taken[stream] :], timeout_s=3.0)

        async with asyncio.timeout(60):
            while sum(count > 2 * WINDOW for count in taken.values()) < 8:
                await asyncio.gather(*map(send_the_rest, taken))
        await connection.close()
    assert sorted(count > 2 * WINDOW for count in taken.values()) == [False] * 4 + [True] * 8


async def test_a_health_check_takes_a_short_message_only() -> None:
    async with started(grpc_settings()) as (address, _), grpc.aio.insecure_channel(address) as channel:
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH)
        assert await check(b"", timeout=60) == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(b"\x0a\x90\x4e" + b"x" * 10_000, timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 4096 bytes" in (raised.value.details() or "")


async def test_a_compressed_message_is_not_made_larger() -> None:
    text = gzip.compress(inside(generate_pb2.GenerateRequest, "text", b"x" * MIB))
    async with started(grpc_settings()) as (address, _):
        connection = await Connection.open(Target(int(address.rpartition(":")[2]), 0, "", ""))
        stream = connection.begin(GENERATE, headers=call_headers(GENERATE) + b"\x00\x0dgrpc-encoding\x04gzip")
        connection.write(frame(0, 1, stream, struct.pack(">BI", 1, len(text)) + text))
        await connection.until_ended(stream, timeout_s=60.0)
        await connection.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (empties(generate_pb2.GenerateRequest, "images", MAX_ENTRIES + 1), "at most 400000 entries"),
        (b"\xb8\x3e\x01" * (MAX_ENTRIES + 1), "at most 400000 entries"),
        (b"\xbb\x3e\xbc\x3e" * (MAX_ENTRIES + 1), "at most 400000 entries"),
        (inside(generate_pb2.GenerateRequest, "output_token_ids", b"\1" * (MAX_NUMBERS + 1)), "numbers in all"),
        (inside(generate_pb2.GenerateRequest, "text", b"x" * MIB)[:-1], "a message of the method's type"),
        (b"\xff" * MIB, "a message of the method's type"),
        (b"\x0f" * MIB, "a message of the method's type"),
    ],
    ids=["entries", "unknown fields", "unknown groups", "numbers", "half a field", "an endless number", "a wrong type"],
)
async def test_a_large_message_of_too_much_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await decode_in_slices(GENERATE_METHOD.input_type, data)


@pytest.mark.parametrize(
    "message",
    [
        generate_pb2.GenerateRequest(text="x" * MIB),
        generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=[70_000] * MIB)),
        generate_pb2.GenerateRequest(
            chat=generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="user", content="hello")] * 100_000)
        ),
        generate_pb2.GenerateRequest(
            text="x" * MIB,
            sampling_params=generate_pb2.SamplingParams(logit_bias={1: 1.0}, stop=["x"], temperature=0.5),
        ),
    ],
    ids=["text", "tokens", "chat", "parameters"],
)
async def test_a_large_message_that_is_useful_is_decoded(message: Message) -> None:
    assert await decode_in_slices(GENERATE_METHOD.input_type, message.SerializeToString()) == message
