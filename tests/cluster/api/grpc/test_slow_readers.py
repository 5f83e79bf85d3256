"""A client that does not read holds up nobody but itself, and not for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.access.access_control import AccessControl
from cluster.api.grpc.interceptor import CallInterceptor
from cluster.api.grpc.slow_readers import SlowReaders
from cluster.api.protos.raypd.v1.generate_pb2 import GenerateRequest
from cluster.api.shared.calls_in_progress import CallsInProgress
from tests.cluster.loop_time import let_pass

RESPONSE = bytes(64 * 1024)
NUM_RESPONSES = 1000
ALL, SOME = "all", "some"
METHOD = "/raypd.v1.GenerateService/Generate"
"""The interceptor bounds messages by what the service's definition says of the method."""


class Source:
    """Streams more than any window holds."""

    def __init__(self) -> None:
        self.num_written = 0
        self.has_left = asyncio.Event()

    async def stream(self, request: str, context: Any) -> None:
        if request == SOME:
            for _ in range(3):
                await context.write(RESPONSE)
            return
        try:
            for _ in range(NUM_RESPONSES):
                await context.write(RESPONSE)
                self.num_written += 1
        finally:
            self.has_left.set()


Call = grpc.aio.UnaryStreamCall[bytes, bytes]
Method = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]


def asking(what: str) -> bytes:
    """A message that asks for all responses, or for some."""
    return GenerateRequest(request_id=what).SerializeToString()


async def read_all(call: Call) -> list[bytes]:
    return [message async for message in call]


@asynccontextmanager
async def serving(source: Source, slow_readers: SlowReaders) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[CallInterceptor(AccessControl(), CallsInProgress(), slow_readers)])
    handler: grpc.RpcMethodHandler[str, bytes] = grpc.unary_stream_rpc_method_handler(
        source.stream, request_deserializer=lambda data: GenerateRequest.FromString(data).request_id
    )
    service, _, name = METHOD.strip("/").partition("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(slow_readers.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        watching.cancel()
        await server.stop(0)


async def test_whoever_does_not_read_is_cut_off_while_others_are_served() -> None:
    source, slow_readers = Source(), SlowReaders(timeout_s=60.0)
    async with serving(source, slow_readers) as channel:
        call: Method = channel.unary_stream(METHOD)
        stalled = call(asking(ALL))
        await anext(aiter(stalled))
        others = [await read_all(call(asking(SOME))) for _ in range(5)]
        assert others == [[RESPONSE] * 3] * 5
        assert slow_readers.num_cut == 0

        num_written = -1
        while source.num_written != num_written:  # Until its windows are full.
            num_written = source.num_written
            await asyncio.sleep(0.1)
        for _ in range(300):
            let_pass(60.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(source.has_left.wait(), 0.1)
                break
        assert slow_readers.num_cut == 1
        assert source.num_written < NUM_RESPONSES
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(read_all(stalled), timeout=60)
    assert raised.value.code() is grpc.StatusCode.ABORTED


async def test_whoever_reads_slowly_but_reads_gets_everything() -> None:
    source, slow_readers = Source(), SlowReaders(timeout_s=60.0)
    async with serving(source, slow_readers) as channel:
        method: Method = channel.unary_stream(METHOD)
        responses = await read_all(method(asking(ALL)))
    assert (len(responses), slow_readers.num_cut) == (NUM_RESPONSES, 0)
