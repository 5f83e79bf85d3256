"""A client that does not read holds up nobody but itself, and not for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.access.control import AccessControl
from cluster.ingress.gate import Gate
from cluster.ingress.interceptor import DoorInterceptor
from cluster.ingress.slow_readers import SlowReaders

RESPONSE = bytes(64 * 1024)
NUM_RESPONSES = 1000


class Source:
    """Streams more than any window holds."""

    def __init__(self) -> None:
        self.num_written = 0
        self.has_left = asyncio.Event()

    async def stream(self, request: bytes, context: Any) -> None:
        try:
            for _ in range(NUM_RESPONSES if request == b"all" else 3):
                await context.write(RESPONSE)
                self.num_written += 1
        finally:
            self.has_left.set()

    async def generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            for _ in range(NUM_RESPONSES):
                yield RESPONSE
        finally:
            self.has_left.set()


Call = grpc.aio.UnaryStreamCall[bytes, bytes]
Method = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]


async def read_all(call: Call) -> list[bytes]:
    return [message async for message in call]


@asynccontextmanager
async def serving(source: Source, slow_readers: SlowReaders, method: str) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[DoorInterceptor(AccessControl(), Gate(), slow_readers)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(getattr(source, method))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(slow_readers.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        watching.cancel()
        await server.stop(0)


@pytest.mark.parametrize("method", ["stream", "generate"])
async def test_whoever_does_not_read_is_cut_off_while_others_are_served(method: str) -> None:
    source, slow_readers = Source(), SlowReaders(timeout_s=0.2)
    async with serving(source, slow_readers, method) as channel:
        call: Method = channel.unary_stream(f"/test.Test/{method}")
        stalled = call(b"all")
        await anext(aiter(stalled))
        if method == "stream":
            others = [await read_all(call(b"some")) for _ in range(5)]
            assert others == [[RESPONSE] * 3] * 5
            source.has_left.clear()

        await asyncio.wait_for(source.has_left.wait(), timeout=10)
        assert slow_readers.num_cut == 1
        assert source.num_written < NUM_RESPONSES
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(read_all(stalled), timeout=10)
    assert raised.value.code() is grpc.StatusCode.ABORTED


async def test_whoever_reads_slowly_but_reads_gets_everything() -> None:
    source, slow_readers = Source(), SlowReaders(timeout_s=5.0)
    async with serving(source, slow_readers, "stream") as channel:
        method: Method = channel.unary_stream("/test.Test/stream")
        responses = await read_all(method(b"all"))
    assert (len(responses), slow_readers.num_cut) == (NUM_RESPONSES, 0)
