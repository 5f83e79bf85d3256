"""Clients of an ingress that drains, on the connections that they have and on new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.api.grpc.server import GrpcServerSettings, IngressServer
from cluster.api.protos.raypd.v1 import admin_pb2, generate_pb2, generate_pb2_grpc
from cluster.client import CallFailed, GenerateClient
from cluster.errors import AddressUnavailable, InvalidConfig
from tests.cluster.api.grpc.answering import AnsweringEngine
from tests.cluster.serving_setup import Pair, grpc_settings, make_ingress_server, make_pair, make_serving

READY = grpc.ChannelConnectivity.READY


@dataclass
class Draining:
    """An ingress that drains while a stream goes on, on a channel that was told to be left.

    responses: of the stream, after the first one
    """

    pair: Pair
    server: IngressServer
    address: str
    channel: grpc.aio.Channel
    responses: AsyncIterator[generate_pb2.GenerateResponse]
    task: asyncio.Task[None]

    async def end_stream(self) -> list[str]:
        """The rest of its text."""
        self.pair.decode.send(self.pair.decode.submitted[0], 1, "b", finish_reason=FinishReason.LENGTH)
        return [response.text async for response in self.responses]


@contextlib.asynccontextmanager
async def _draining(settings: GrpcServerSettings | None = None) -> AsyncIterator[Draining]:
    pair = make_pair()
    server = make_ingress_server(pair.serving, settings=settings)
    address = f"127.0.0.1:{await server.start()}"
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        responses = aiter(stub.Generate(generate_pb2.GenerateRequest(text="hello")))
        producer, _ = await pair.next_requests()
        pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        assert (await anext(responses)).text == "a"
        task = asyncio.create_task(server.drain(grace_s=600))
        await channel.wait_for_state_change(READY)
        yield Draining(pair, server, address, channel, responses, task)
        await task


async def _health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    check: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return (await check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)).status


async def test_a_connection_is_told_to_be_left_and_its_stream_goes_on_to_its_end() -> None:
    async with _draining() as draining:
        assert draining.channel.get_state() is not READY, "while the stream is open: this is the GOAWAY"
        assert await draining.end_stream() == ["b"]
        await draining.task
        assert draining.pair.num_unfinished_requests == 0


async def test_new_connections_are_told_why_they_are_refused_until_the_last_stream_is_over() -> None:
    async with _draining() as draining, grpc.aio.insecure_channel(draining.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        late = stub.Generate(generate_pb2.GenerateRequest(), wait_for_ready=True)
        with pytest.raises(grpc.aio.AioRpcError, match="this ingress is draining") as raised:
            await late.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await _health_of(channel, "raypd.v1.GenerateService") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await _health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await draining.end_stream()
        await draining.task
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection(*draining.address.split(":"))


@pytest.mark.parametrize("admin_port", [None, 0])
async def test_an_administrator_sees_it_drain(admin_port: int | None) -> None:
    async with _draining(grpc_settings(admin_port=admin_port)) as draining:
        own = draining.server.admin_port
        async with GenerateClient(draining.address if own is None else f"127.0.0.1:{own}") as client:
            status: admin_pb2.GetStatusResponse | None = None
            while status is None:
                with contextlib.suppress(CallFailed):
                    status = await client.status()
        assert len(status.requests) == 1
        await draining.end_stream()


@pytest.mark.parametrize("error", [AddressUnavailable("1", "it is taken"), InvalidConfig("ingress.tls", ["is gone"])])
async def test_a_port_that_cannot_be_had_again_only_leaves_refusals_unexplained(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def taken(self: IngressServer, server: grpc.aio.Server, port: int) -> int:
        raise error

    monkeypatch.setattr("cluster.api.grpc.server._REBIND_TIMEOUT_S", 0.2)
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    async with GenerateClient(f"127.0.0.1:{await server.start()}") as client:
        responses = client.generate("hello")
        first = asyncio.ensure_future(anext(responses))
        producer, consumer = await pair.next_requests()
        pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        await first
        monkeypatch.setattr(IngressServer, "_listen", taken)
        task = asyncio.create_task(server.drain(grace_s=600))
        async with asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.05)
            pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
            assert [response.text async for response in responses] == ["b"]
            await task
    assert [record.message for record in caplog.records] == [
        "cannot listen again while this ingress drains: new clients get no answer"
    ]


@pytest.mark.parametrize("grace_s", [0.0, 0.02])
async def test_a_drain_whose_grace_ends_before_its_calls_cuts_them(
    grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times: gRPC's crash where two stops of one server ended together came in one of several."""
    monkeypatch.setattr("cluster.api.grpc.server._NOTICE_S", 0.005)

    async def drain_under_a_call() -> None:
        pair = make_pair()
        server = make_ingress_server(pair.serving)
        async with GenerateClient(f"127.0.0.1:{await server.start()}", recovery_timeout_s=0.0) as client:
            answer = asyncio.create_task(client.complete("hello", resume=False))
            await pair.next_requests()
            await server.drain(grace_s)
            with pytest.raises(CallFailed, match=r"UNAVAILABLE|CANCELLED"):
                await answer
        assert pair.num_unfinished_requests == 0

    async with asyncio.timeout(60):
        for _ in range(10):
            await asyncio.gather(*(drain_under_a_call() for _ in range(4)))


async def test_our_client_goes_elsewhere_without_losing_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those calls that cross the GOAWAY, which gRPC cancels: without notice there are some."""
    monkeypatch.setattr("cluster.api.grpc.server._NOTICE_S", 0.0)
    servers = [make_ingress_server(make_serving(AnsweringEngine())) for _ in range(2)]
    addresses = [f"127.0.0.1:{await server.start()}" for server in servers]
    async with asyncio.timeout(60), GenerateClient(addresses) as client:
        await client.complete("hello", max_tokens=2)
        async with servers[0]._in_progress:  # It drains until the calls are answered; the client would rather go there.
            draining = asyncio.create_task(servers[0].drain(grace_s=600))
            for _ in range(5):
                answers = await asyncio.gather(*(client.complete("hello", max_tokens=2) for _ in range(4)))
                assert [answer.text for answer in answers] == ["ab"] * 4
            assert not draining.done()
        await draining
    await servers[1].drain(0)
