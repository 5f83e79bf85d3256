"""Attacks by clients that ask what the ingress and its requests do: metrics, explanations, the live page, traces."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.client.channel import open_channel
from tests.attacks.raw_http2 import END_STREAM, Connection, call_headers, frame, message_head
from tests.attacks.target import Attack, Target

_EXPLAIN: Final = "/raypd.v1.GenerateService/Explain"
_GENERATE: Final = "/raypd.v1.GenerateService/Generate"
_NO_WINDOW: Final = struct.pack(">HI", 4, 0)
_HOLD_S: Final = 1.5
_ID: Final = "r" * 120
_TRACEPARENTS: Final = (
    "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "00-" + "a" * 60_000,
    "01-" + "a" * 32 + "-" + "b" * 16 + "-01-" + "-" * 60_000,
    "\xff" * 1000,
    "-" * 60_000,
)

Send = Callable[[Target], Awaitable[None]]


async def _end_requests(target: Target, count: int) -> None:
    """Leave the records of some requests."""
    sampling = generate_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
    async with open_channel(target.grpc_address, target.credentials(target.token)) as channel:
        generate = generate_pb2_grpc.GenerateServiceStub(channel).Generate

        async def one(number: int) -> None:
            request = generate_pb2.GenerateRequest(text="x", request_id=f"{number}-{_ID}", sampling_params=sampling)
            async for _ in generate(request):
                pass

        for begin in range(0, count, 50):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 50)))


def explanations(num_calls: int, *, is_read: bool) -> Send:
    """Ask often for the records of the last 500 requests, over one connection."""
    requests = generate_pb2.ExplainRequest(last=500).SerializeToString()

    async def send(target: Target) -> None:
        await _end_requests(target, 500)
        connection = await Connection.open(target, b"" if is_read else _NO_WINDOW)
        for number in range(num_calls):
            stream = connection.begin(_EXPLAIN, target.token)
            connection.write(frame(0, END_STREAM, stream, message_head(len(requests)) + requests))
            if number % 100 == 0:
                await connection.drain()
        await connection.drain()
        await asyncio.sleep(_HOLD_S)
        await connection.close()

    return send


def pages(path: str, num_calls: int, statuses: frozenset[int], *, is_admin: bool = False, is_read: bool = True) -> Send:
    """Ask for the same page on many connections at a time. statuses: with which it may be answered"""

    async def get(target: Target) -> int:
        reader, writer = await target.connect_http()
        token = target.admin_token if is_admin else target.token
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n\r\n"
        writer.write(head.encode())
        try:
            status = int((await reader.readline()).split()[1])
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S):
                    while is_read and await reader.read(65_536):
                        pass
                    await asyncio.sleep(_HOLD_S)
            return status
        finally:
            writer.transport.abort()

    async def send(target: Target) -> None:
        answered = set(await asyncio.gather(*(get(target) for _ in range(num_calls))))
        assert answered <= statuses, answered

    return send


async def _strange_trace_contexts(target: Target) -> None:
    """Begin calls with each of these headers, by gRPC and by HTTP."""
    message = generate_pb2.GenerateRequest(
        text="x", sampling_params=generate_pb2.SamplingParams(max_tokens=1)
    ).SerializeToString()
    connection = await Connection.open(target)
    for traceparent in _TRACEPARENTS:
        value = traceparent.encode("latin-1").ljust(127, b"-")[:8000]
        headers = call_headers(_GENERATE, target.token) + b"\x00\x0btraceparent\x7f" + _varint(len(value) - 127) + value
        stream = connection.begin(_GENERATE, headers=headers)
        connection.write(frame(0, END_STREAM, stream, message_head(len(message)) + message))
    await connection.drain()
    for traceparent in _TRACEPARENTS:
        reader, writer = await target.connect_http()
        body = b'{"prompt": "x", "max_tokens": 1}'
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {target.token}\r\ntraceparent: {traceparent}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode("latin-1") + body)
        status = int((await reader.readline()).split()[1])
        writer.transport.abort()
        assert status in {200, 400, 431}, f"{status} for {traceparent[:80]!r}"
    await connection.close()


def _varint(number: int) -> bytes:
    """Encode the rest of a length of HPACK that begins with seven bits."""
    encoded = bytearray()
    while number >= 128:
        encoded.append(128 | number & 127)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


ATTACKS: list[Attack] = [
    Attack("2000 explanations that nobody reads", explanations(2000, is_read=False)),
    Attack("500 explanations at a time", explanations(500, is_read=True)),
    Attack("300 calls for metrics at a time", pages("/metrics", 300, frozenset({200}))),
    Attack("400 metrics that nobody reads", pages("/metrics", 400, frozenset({200}), is_read=False)),
    Attack("100 viewers of the live page", pages("/ui/events", 100, frozenset({200, 429}), is_admin=True)),
    Attack(
        "100 viewers who do not read", pages("/ui/events", 100, frozenset({200, 429}), is_admin=True, is_read=False)
    ),
    Attack("200 viewers who may not", pages("/ui/events", 200, frozenset({403}))),
    Attack("strange trace contexts", _strange_trace_contexts),
]
