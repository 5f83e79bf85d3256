"""Attacks by clients that can connect by gRPC: without a token, or with calls that never end."""
# ruff: noqa: E501  # a table

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from cluster.api.protos.raypd.v1 import generate_pb2
from tests.attacks.raw_http2 import (
    CONTINUATION,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Connection,
    call_headers,
    frame,
    message_head,
)
from tests.attacks.target import Attack, Target
from tests.attacks.wire import inside

_GENERATE: Final = "/raypd.v1.GenerateService/Generate"
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_MIB: Final = 2**20
_LARGE: Final = 15 * _MIB
_SEND_S: Final = 1.5
_FLOOD_S: Final = 3.0
_WRONG: Final = "raypd-wrong"

Send = Callable[[Target], Awaitable[None]]


def unfinished(path: str, num_streams: int, max_sent_mib: int, token: str | None = None) -> Send:
    """Begin messages of 15 MiB that never end, each on a connection of its own.

    max_sent_mib: that the ingress may have taken of them in all; token: None: one that may call
    """

    async def send(target: Target) -> None:
        connections = [await Connection.open(target) for _ in range(num_streams)]
        part = message_head(_LARGE + 1) + b"\0" * _LARGE
        sending = []
        for connection in connections:
            stream = connection.begin(path, target.token if token is None else token)
            sending.append(connection.send(stream, part, _SEND_S))
        await asyncio.gather(*sending)
        num_sent = sum(connection.num_sent for connection in connections)
        for connection in connections:
            await connection.close()
        assert num_sent <= max_sent_mib * _MIB, f"{num_sent / _MIB:.0f} MiB were taken"

    return send


def streams(path: str, num_streams: int, token: str | None = None) -> Send:
    """Begin a message in each of many streams of one connection."""

    async def send(target: Target) -> None:
        connection = await Connection.open(target)
        for number in range(num_streams):
            stream = connection.begin(path, target.token if token is None else token)
            connection.write(frame(0, 0, stream, message_head(_MIB) + b"\0" * 4))
            if number % 500 == 0:
                await connection.drain()
        await asyncio.sleep(0.3)
        await connection.close()

    return send


async def _reset_streams(target: Target) -> None:
    connection = await Connection.open(target)
    for number in range(30_000):
        stream = connection.begin(_GENERATE, _WRONG)
        connection.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        if number % 500 == 0:
            await connection.drain()
    await asyncio.sleep(0.3)
    await connection.close()


async def _connect_often(target: Target) -> None:
    connections = [await target.connect_grpc() for _ in range(800)]
    await asyncio.sleep(0.5)
    for _, writer in connections:
        writer.transport.abort()


def flood(data: bytes, num_times: int, *, is_read: bool = True) -> Send:
    """Send the same frames again and again. is_read: whether what is answered is taken"""

    async def send(target: Target) -> None:
        connection = await Connection.open(target, is_read=is_read)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLOOD_S):
                for _ in range(num_times):
                    connection.write(data)
                    await connection.drain()
        await connection.close()

    return send


def large_headers(num_mib: int) -> Send:
    """Send headers in frames that go on and on."""

    async def send(target: Target) -> None:
        connection = await Connection.open(target)
        connection.write(frame(HEADERS, 0, 1, call_headers(_GENERATE)))
        for _ in range(num_mib * 64):
            connection.write(frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f\x81\x7f" + b"b" * 16_384))
            await connection.drain()
            if connection.is_over:
                break
        await connection.close()

    return send


async def _overflow_windows(target: Target) -> None:
    """Open windows until they are larger than HTTP/2 allows, for a stream and for all of a connection."""
    most = struct.pack(">I", 2**31 - 1)
    for stream in (0, 1):
        for _ in range(50):
            connection = await Connection.open(target)
            connection.begin(_GENERATE, target.token)
            connection.write(frame(WINDOW_UPDATE, 0, stream, most) * 100)
            await connection.drain()
            await connection.close()


async def _nobody_reads(target: Target) -> None:
    """60 streams whose windows are never opened, and which therefore nobody can be sent anything on."""
    connection = await Connection.open(target, struct.pack(">HI", 4, 0))
    sampling = generate_pb2.SamplingParams(max_tokens=3000, ignore_eos=True)
    request = generate_pb2.GenerateRequest(text="x" * 50, sampling_params=sampling).SerializeToString()
    for _ in range(60):
        stream = connection.begin(_GENERATE, target.token)
        connection.write(frame(0, END_STREAM, stream, message_head(len(request)) + request))
    await connection.drain()
    await asyncio.sleep(1.5)
    await connection.close()


async def _bomb(target: Target) -> None:
    """256 MiB of text in 256 kB."""
    text = gzip.compress(inside(generate_pb2.GenerateRequest, "text", b"x" * (256 * _MIB)), 9)
    connection = await Connection.open(target)
    headers = call_headers(_GENERATE, target.token) + b"\x00\x0dgrpc-encoding\x04gzip"
    await connection.send(
        connection.begin(_GENERATE, headers=headers), struct.pack(">BI", 1, len(text)) + text, _SEND_S
    )
    await asyncio.sleep(0.5)
    await connection.close()


ATTACKS: list[Attack] = [
    Attack("30 endless messages with a wrong token", unfinished(_GENERATE, 30, 8, _WRONG)),
    Attack("30 endless messages to tokenize, with a wrong token", unfinished("/raypd.v1.ModelService/Tokenize", 30, 8, _WRONG)),
    Attack("30 endless messages with a token", unfinished(_GENERATE, 30, 150)),
    Attack("30 endless messages to the health service", unfinished(_HEALTH, 30, 80, "")),
    Attack("30 endless messages to reflection", unfinished(_REFLECTION, 30, 80, "")),
    Attack("16 000 streams with a wrong token", streams(_GENERATE, 16_000, _WRONG)),
    Attack("4000 unfinished streams with a token", streams(_GENERATE, 4000)),
    Attack("4000 unfinished health checks", streams(_HEALTH, 4000, "")),
    Attack("30 000 streams that are reset", _reset_streams),
    Attack("800 connections that say nothing", _connect_often),
    Attack("50 000 SETTINGS", flood(frame(SETTINGS, 0, 0) * 500, 100)),
    Attack("50 000 SETTINGS whose answers nobody reads", flood(frame(SETTINGS, 0, 0) * 500, 100, is_read=False)),
    Attack("200 000 SETTINGS of the header table", flood(frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 2**20)) * 500, 400)),
    Attack("50 000 PINGs", flood(frame(PING, 0, 0, b"12345678") * 500, 100)),
    Attack("50 000 PINGs whose answers nobody reads", flood(frame(PING, 0, 0, b"12345678") * 500, 100, is_read=False)),
    Attack("empty frames of a stream that is not open", flood(frame(0, 0, 7) * 500, 100)),
    Attack("headers of 16 MiB", large_headers(16)),
    Attack("headers of 98 MiB in CONTINUATION frames", large_headers(98)),
    Attack("windows that overflow", _overflow_windows),
    Attack("60 streams that nobody reads", _nobody_reads),
    Attack("256 MiB in a compressed message", _bomb),
]  # fmt: skip
