"""What whoever can connect by gRPC can do without a token, or with calls that never end."""
# ruff: noqa: E501  # a table

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Awaitable, Callable
from typing import Final

from cluster.ingress.protos.raypd.v1 import generate_pb2
from tests.attacks.raw_http2 import HEADERS, RST_STREAM, SETTINGS, Connection, call_headers, frame, message_head
from tests.attacks.target import Attack, Target
from tests.attacks.wire import inside

_GENERATE: Final = "/raypd.v1.GenerateService/Generate"
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_MIB: Final = 2**20
_LARGE: Final = 15 * _MIB
_SEND_S: Final = 1.5
_WRONG: Final = "raypd-wrong"

Send = Callable[[Target], Awaitable[None]]


def unfinished(path: str, num_streams: int, max_sent_mib: int, token: str | None = None) -> Send:
    """Begin messages of 15 MiB that never end, each on a connection of its own.

    max_sent_mib: that the ingress may have taken of them in all; token: None: one that may call
    """

    async def send(target: Target) -> None:
        connections = [await Connection.open(target.grpc_port) for _ in range(num_streams)]
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
        connection = await Connection.open(target.grpc_port)
        for number in range(num_streams):
            stream = connection.begin(path, target.token if token is None else token)
            connection.write(frame(0, 0, stream, message_head(_MIB) + b"\0" * 4))
            if number % 500 == 0:
                await connection.drain()
        await asyncio.sleep(0.3)
        await connection.close()

    return send


async def _reset_streams(target: Target) -> None:
    connection = await Connection.open(target.grpc_port)
    for number in range(30_000):
        stream = connection.begin(_GENERATE, _WRONG)
        connection.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        if number % 500 == 0:
            await connection.drain()
    await asyncio.sleep(0.3)
    await connection.close()


async def _connect_often(target: Target) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", target.grpc_port) for _ in range(800)]
    await asyncio.sleep(0.5)
    for _, writer in connections:
        writer.close()


async def _flood_settings(target: Target) -> None:
    connection = await Connection.open(target.grpc_port)
    for _ in range(100):
        connection.write(frame(SETTINGS, 0, 0) * 500)
        await connection.drain()
    await connection.close()


async def _large_headers(target: Target) -> None:
    """Headers of 16 MiB, in frames that go on and on."""
    connection = await Connection.open(target.grpc_port)
    connection.write(frame(HEADERS, 0, 1, call_headers(_GENERATE)))
    for _ in range(1000):
        connection.write(frame(9, 0, 1, b"\x00\x01a\x7f\x81\x7f" + b"b" * 16_384))
        await connection.drain()
    await connection.close()


async def _bomb(target: Target) -> None:
    """256 MiB of text in 256 kB."""
    text = gzip.compress(inside(generate_pb2.GenerateRequest, "text", b"x" * (256 * _MIB)), 9)
    connection = await Connection.open(target.grpc_port)
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
    Attack("50 000 SETTINGS", _flood_settings),
    Attack("headers of 16 MiB", _large_headers),
    Attack("256 MiB in a compressed message", _bomb),
]  # fmt: skip
