"""An ingress whose engine answers whatever it is asked, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.api.protos.raypd.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import grpc_settings, make_ingress_server, make_serving
from tests.fakes import FakeEngine

MAX_MESSAGE_BYTES = 16 * 2**20


class AnsweringEngine(FakeEngine):
    """Gives each request two tokens and its end."""

    def __init__(self) -> None:
        super().__init__("b0", EngineRole.BOTH)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        outputs = super().submit(request)
        position = len(request.output_token_ids)
        self.send(request, position, "a")
        self.send(request, position + 1, "b", finish_reason=FinishReason.LENGTH)
        return outputs


def methods() -> Iterator[MethodDescriptor]:
    """Every method of every service."""
    for file in (admin_pb2, embed_pb2, generate_pb2, model_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


@asynccontextmanager
async def answering_ingress() -> AsyncIterator[tuple[grpc.aio.Channel, Serving, FakeEngine]]:
    """A channel to it, and what is behind it."""
    engine = AnsweringEngine()
    serving = make_serving(engine)
    server = make_ingress_server(serving, settings=grpc_settings(max_message_bytes=MAX_MESSAGE_BYTES))
    port = await server.start()
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel, serving, engine
    await server.drain(0)


async def status_of(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Message | bytes
) -> grpc.aio.AioRpcError | None:
    """Make a call and read all of it; None if it went well."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    data = request if isinstance(request, bytes) else request.SerializeToString()
    read = GetMessageClass(method.output_type).FromString
    try:
        async with asyncio.timeout(60):
            if method.server_streaming:
                stream: grpc.aio.UnaryStreamMultiCallable[bytes, Message] = channel.unary_stream(
                    path, response_deserializer=read
                )
                async for _ in stream(data):
                    pass
            else:
                unary: grpc.aio.UnaryUnaryMultiCallable[bytes, Message] = channel.unary_unary(
                    path, response_deserializer=read
                )
                await unary(data)
    except grpc.aio.AioRpcError as error:
        return error
    return None
