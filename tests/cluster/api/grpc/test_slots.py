"""A token's `concurrent` slot comes back whichever way a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.api.grpc.server import IngressServer
from cluster.api.protos.raypd.v1 import embed_pb2, embed_pb2_grpc, generate_pb2, generate_pb2_grpc
from cluster.client.channel import open_channel
from cluster.client.client_credentials import Credentials
from tests.cluster.api.grpc.test_access import ALICE, access
from tests.cluster.serving_setup import Pair, grpc_settings, make_ingress_server, make_pair
from tests.kv_transfer.swallowing_proxy import SwallowingProxy

_TIMEOUT_S = 60.0
_HELLO = generate_pb2.GenerateRequest(text="hello")


@dataclass
class Slot:
    """An ingress that lets a token have one request at a time, and a client of it that can be cut off."""

    pair: Pair
    server: IngressServer
    allowance: Allowance
    proxy: SwallowingProxy
    channel: grpc.aio.Channel

    async def begin(self, request: generate_pb2.GenerateRequest = _HELLO) -> Call:
        """A call of which the first token has come."""
        call = generate_pb2_grpc.GenerateServiceStub(self.channel).Generate(request)
        reading = asyncio.ensure_future(call.read())
        producer, _ = await self.pair.next_requests()
        self.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        await reading
        assert self.allowance.num_running == 1
        return call

    async def until_free(self) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while self.allowance.num_running:  # noqa: ASYNC110  # the server's task
                await asyncio.sleep(0.005)


Call = grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]


@asynccontextmanager
async def _slot(tmp_path: Path) -> AsyncIterator[Slot]:
    control = access(tmp_path / "tokens")
    pair = make_pair()
    server = make_ingress_server(pair.serving, settings=grpc_settings(access=control))
    with SwallowingProxy(await server.start()) as proxy:
        async with open_channel(proxy.address, Credentials(ALICE)) as channel:
            allowance = control.authenticate(f"Bearer {ALICE}").allowance
            yield Slot(pair, server, allowance, proxy, channel)
    await server.drain(0)


async def _ends(slot: Slot) -> None:
    call = await slot.begin()
    slot.pair.decode.send(slot.pair.decode.submitted[0], 1, "b", finish_reason=FinishReason.LENGTH)
    await call.read()


async def _is_cancelled(slot: Slot) -> None:
    (await slot.begin()).cancel()


async def _dies(slot: Slot) -> None:
    await slot.begin()
    slot.proxy.cut()


async def _runs_out_of_time(slot: Slot) -> None:
    for timeout_s in (0.5, 5.0, 50.0):
        call = generate_pb2_grpc.GenerateServiceStub(slot.channel).Generate(_HELLO, timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if slot.pair.decode.submitted:
            return  # A busy machine may need more than the first time for as much.
        await slot.until_free()
    raise AssertionError("no request was given to the engines")


async def _loses_its_engine(slot: Slot) -> None:
    await slot.begin()
    slot.pair.decode.lose()


async def _is_given_up(slot: Slot) -> None:
    await slot.begin()
    consumer = slot.pair.decode.submitted[0]
    slot.pair.decode.send(consumer, 1, "", finish_reason=FinishReason.ERROR, error="NaN in its logits")


async def _meets_a_bug(slot: Slot) -> None:
    slot.pair.prefill.submit = None  # type: ignore[method-assign, assignment]  # a bug
    await _refused(slot, _HELLO, grpc.StatusCode.INTERNAL)


async def _is_wrong(slot: Slot) -> None:
    await _refused(slot, generate_pb2.GenerateRequest(text="x" * 64), grpc.StatusCode.INVALID_ARGUMENT)


async def _has_an_id_that_is_taken(slot: Slot) -> None:
    slot.allowance.set_limits(AllowanceLimits(concurrent=2))
    call = await slot.begin(generate_pb2.GenerateRequest(text="hello", request_id="mine"))
    again = generate_pb2.GenerateRequest(text="hello", request_id="mine")
    await _refused(slot, again, grpc.StatusCode.INVALID_ARGUMENT)
    assert slot.allowance.num_running == 1
    call.cancel()


async def _is_one_too_many(slot: Slot) -> None:
    call = await slot.begin()
    await _refused(slot, _HELLO, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert slot.allowance.num_running == 1
    call.cancel()


async def _is_a_batch_that_is_too_large(slot: Slot) -> None:
    batch = generate_pb2.GenerateBatchRequest(prompts=[generate_pb2.Prompt(text="x")], n=2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate_pb2_grpc.GenerateServiceStub(slot.channel).GenerateBatch(batch).read()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert slot.pair.decode.submitted == []


async def _wants_vectors_of_a_model_that_has_none(slot: Slot) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await embed_pb2_grpc.EmbedServiceStub(slot.channel).Embed(embed_pb2.EmbedRequest())


async def _outlasts_a_drain(slot: Slot) -> None:
    await slot.begin()
    await slot.server.drain(0)


async def _refused(slot: Slot, request: generate_pb2.GenerateRequest, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate_pb2_grpc.GenerateServiceStub(slot.channel).Generate(request).read()
    assert raised.value.code() is code, raised.value.details()


@pytest.mark.parametrize(
    "come_to_its_end",
    [
        _ends,
        _is_cancelled,
        _dies,
        _runs_out_of_time,
        _loses_its_engine,
        _is_given_up,
        _meets_a_bug,
        _is_wrong,
        _has_an_id_that_is_taken,
        _is_one_too_many,
        _is_a_batch_that_is_too_large,
        _wants_vectors_of_a_model_that_has_none,
        _outlasts_a_drain,
    ],
)
async def test_a_request_gives_its_slot_back_when_it(
    come_to_its_end: Callable[[Slot], Awaitable[None]], tmp_path: Path
) -> None:
    async with _slot(tmp_path) as slot:
        await come_to_its_end(slot)
        await slot.until_free()
        assert slot.pair.serving.num_requests_in_flight == 0
