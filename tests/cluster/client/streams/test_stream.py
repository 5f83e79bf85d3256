"""A stream outlives the ingress that it comes from, and its reader does not notice.

Tests of cluster/client/channel.py, cluster/client/known_ingresses.py, cluster/client/streams/attempts.py,
cluster/client/streams/calls.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.api.grpc.server import IngressServer
from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.client import CallFailed, GenerateClient, channel
from cluster.parameters.generation import GenerateChunk, GenerateRequest
from tests.cluster.loop_time import let_pass
from tests.cluster.serving_setup import Pair, make_ingress_server, make_pair
from tests.kv_transfer.swallowing_proxy import SwallowingProxy
from tests.ports import free_port

LENGTH = FinishReason.LENGTH
NOBODY = "127.0.0.1:1"
_TIMEOUT_S = 60.0


@dataclass
class RunningIngress:
    """An ingress with a pair of engines of its own."""

    pair: Pair
    server: IngressServer
    address: str

    async def begin(self, answer: Answer, text: str) -> EngineCoreRequest:
        """A request that has got this text from its engines, and its client as well; what decode was asked."""
        producer, consumer = await self.pair.next_requests()
        position = len(consumer.output_token_ids)
        self.pair.prefill.send(producer, position, text[:1], end_cause=EndCause.HANDED_OVER)
        if text[1:]:
            self.pair.decode.send(consumer, position + 1, text[1:])
        await answer.wait_for_tokens(position + len(text))
        return consumer

    async def finish(self, text: str) -> EngineCoreRequest:
        """A request that is answered with this text to its end; what prefill was asked."""
        producer, consumer = await self.pair.next_requests()
        position = len(consumer.output_token_ids)
        self.pair.prefill.send(producer, position, text[:1], end_cause=EndCause.HANDED_OVER)
        self.pair.decode.send(consumer, position + 1, text[1:], finish_reason=LENGTH)
        return producer

    async def die(self) -> None:
        """Every call is cut, and nobody listens any more."""
        await self.server.drain(grace_s=0)


class Answer:
    """One stream, read by a task of its own."""

    def __init__(self, client: GenerateClient, **parameters: Any) -> None:
        self.responses: list[generate_pb2.GenerateResponse] = []
        self._has_more = asyncio.Condition()
        self.task = asyncio.create_task(self._read(client, parameters))

    async def _read(self, client: GenerateClient, parameters: dict[str, Any]) -> None:
        async with aclosing(client.generate("hello", **parameters)) as responses:
            async for response in responses:
                async with self._has_more:
                    self.responses.append(response)
                    self._has_more.notify_all()

    async def wait_for_tokens(self, num_tokens: int) -> None:
        async with asyncio.timeout(_TIMEOUT_S), self._has_more:
            await self._has_more.wait_for(lambda: len(self.token_ids) >= num_tokens)

    async def wait_over(self) -> None:
        await asyncio.wait_for(self.task, _TIMEOUT_S)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for response in self.responses for token_id in response.token_ids]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)


@asynccontextmanager
async def ingresses(num_ingresses: int, max_requests_in_flight: int = 100) -> AsyncIterator[list[RunningIngress]]:
    opened = []
    for _ in range(num_ingresses):
        pair = make_pair(max_requests_in_flight)
        server = make_ingress_server(pair.serving, port=free_port())  # Some listen there again later.
        opened.append(RunningIngress(pair, server, f"127.0.0.1:{await server.start()}"))
    try:
        yield opened
    finally:
        for ingress in opened:
            await ingress.server.drain(grace_s=0)


async def test_a_stream_goes_on_at_another_ingress_where_the_first_one_was_cut() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client, request_id="mine", max_tokens=5)
        begun = await first.begin(answer, "abc")
        await first.die()
        resumed = await second.finish("de")
        await answer.wait_over()
    assert answer.text == "abcde"
    assert resumed.output_token_ids == list(b"abc")
    assert resumed.sampling_params == begun.sampling_params, "the seed above all, which was drawn"
    assert {response.request_id for response in answer.responses} == {"mine"}
    with_tokens = [response for response in answer.responses if response.token_ids]
    assert [response.first_position for response in with_tokens] == [0, 1, 3, 4]
    assert [response.HasField("seed") for response in answer.responses] == [
        True,
        *[False] * (len(answer.responses) - 1),
    ]
    assert answer.responses[-1].usage.output_tokens == 5


async def test_a_stream_goes_on_at_the_same_ingress_when_it_is_back() -> None:
    async with ingresses(1) as (ingress,), GenerateClient(ingress.address) as client:
        answer = Answer(client)
        await ingress.begin(answer, "ab")
        await ingress.die()
        ingress.server = make_ingress_server(ingress.pair.serving, port=int(ingress.address.rpartition(":")[2]))
        await ingress.server.start()
        await ingress.finish("cd")
        await answer.wait_over()
    assert answer.text == "abcd"


async def test_a_request_whose_ingress_dies_before_its_first_token_is_asked_again() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client)
        await first.pair.next_requests()
        await first.die()
        assert (await second.finish("ab")).output_token_ids == []
        await answer.wait_over()
    assert answer.text == "ab"


async def test_a_request_that_an_ingress_had_taken_on_waits_for_it_to_come_back() -> None:
    async with ingresses(1) as (ingress,), GenerateClient(ingress.address) as client:
        answer = Answer(client)
        await ingress.pair.next_requests()
        await ingress.die()
        ingress.server = make_ingress_server(ingress.pair.serving, port=int(ingress.address.rpartition(":")[2]))
        await ingress.server.start()
        await ingress.finish("ab")
        await answer.wait_over()
    assert answer.text == "ab"


@pytest.mark.parametrize(("after", "text"), [("d", "ab"), ("x", "abcx")])
async def test_a_stop_string_may_begin_before_the_cut_and_end_after_it(after: str, text: str) -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client, stop=["cd"])
        await first.begin(answer, "abc")
        assert answer.text == "ab", "the c is held back"
        await first.die()
        await second.finish(after)
        await answer.wait_over()
    assert answer.text == text
    assert answer.responses[-1].stop_string == ("cd" if text == "ab" else "")


async def test_half_a_character_before_the_cut_is_completed_after_it() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client)
        producer, _ = await first.pair.next_requests()
        first.pair.prefill.send(producer, 0, [0xC3], end_cause=EndCause.HANDED_OVER)
        await answer.wait_for_tokens(1)
        await first.die()
        producer, consumer = await second.pair.next_requests()
        second.pair.prefill.send(producer, 1, [0xA9], end_cause=EndCause.HANDED_OVER)
        second.pair.decode.send(consumer, 2, "!", finish_reason=LENGTH)
        await answer.wait_over()
    assert answer.text == "é!"


async def test_a_connection_that_breaks_is_not_the_streams_end_although_its_ingress_lives() -> None:
    async with ingresses(1) as (ingress,):
        with SwallowingProxy(int(ingress.address.rpartition(":")[2])) as proxy:
            async with GenerateClient(proxy.address) as client:
                answer = Answer(client, request_id="mine")
                await ingress.begin(answer, "ab")
                proxy.cut()
                await ingress.finish("cd")
                await answer.wait_over()
    assert answer.text == "abcd"


async def test_an_ingress_that_the_network_has_swallowed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = {"grpc.keepalive_time_ms": 300, "grpc.http2.ping_timeout_ms": 6000}
    options = tuple((dict(channel._OPTIONS) | impatient).items())
    monkeypatch.setattr(channel, "_OPTIONS", options)
    async with ingresses(2) as (swallowed, other):
        with SwallowingProxy(int(swallowed.address.rpartition(":")[2])) as proxy:
            async with GenerateClient([proxy.address, other.address]) as client:
                answer = Answer(client)
                await swallowed.begin(answer, "ab")
                proxy.swallow()
                await other.finish("cd")
                await answer.wait_over()
    assert answer.text == "abcd"


async def test_an_engine_that_was_lost_is_not_the_streams_end() -> None:
    async with ingresses(1) as (ingress,), GenerateClient(ingress.address) as client:
        answer = Answer(client)
        await ingress.begin(answer, "ab")
        ingress.pair.decode.lose()  # ABORTED, as this ingress tries once.
        await ingress.finish("cd")
        await answer.wait_over()
    assert answer.text == "abcd"


async def test_ingresses_that_are_not_there_or_drain_are_passed_over() -> None:
    async with (
        ingresses(2) as (draining, open_),
        GenerateClient(draining.address) as other,
        GenerateClient(f"{NOBODY},{draining.address}, {open_.address}") as client,
    ):
        occupying = Answer(other)
        occupant = await draining.pair.next_requests()
        closing = asyncio.create_task(draining.server.drain(grace_s=10 * _TIMEOUT_S))
        while not draining.server._in_progress._is_closed:  # noqa: ASYNC110  # at once, but for a few turns of the loop
            await asyncio.sleep(0)
        answer = Answer(client)
        await open_.finish("ab")
        await answer.wait_over()
        draining.pair.prefill.send(occupant[0], 0, "x", finish_reason=LENGTH)
        await occupying.wait_over()
        await closing
    assert (answer.text, occupying.text) == ("ab", "x")
    assert len(draining.pair.decode.submitted) == 1


async def test_without_any_ingress_a_new_request_does_not_wait() -> None:
    async with GenerateClient([NOBODY, NOBODY], recovery_timeout_s=600.0) as client:
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await asyncio.wait_for(anext(client.generate("hello")), _TIMEOUT_S)


async def test_a_cut_stream_waits_no_longer_than_the_recovery_timeout() -> None:
    async with ingresses(1) as (ingress,), GenerateClient(ingress.address, recovery_timeout_s=0.1) as client:
        answer = Answer(client)
        await ingress.begin(answer, "ab")
        await ingress.die()
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await answer.wait_over()
    assert answer.text == "ab"


async def test_a_cut_stream_waits_no_longer_than_its_caller() -> None:
    async with ingresses(1) as (ingress,), GenerateClient(ingress.address) as client:
        answer = Answer(client, timeout_s=40.0)
        await ingress.begin(answer, "ab")
        await ingress.die()
        for _ in range(50):  # It hears of the cut in the first of these seconds.
            await asyncio.sleep(0.01)
            let_pass(1.0)
        with pytest.raises(CallFailed, match="the deadline passed while the answer waited") as raised:
            await answer.wait_over()
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_full_ingress_is_left_alone_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        ingresses(2, max_requests_in_flight=1) as (first, full),
        GenerateClient(full.address) as other,
        GenerateClient([first.address, full.address]) as client,
    ):
        serving, refused = full.pair.serving, list[float]()
        has_refused, generate = asyncio.Event(), serving.generate

        def generate_and_notice(request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            if serving.num_requests_in_flight:
                refused.append(asyncio.get_running_loop().time())
                has_refused.set()
            return generate(request)

        monkeypatch.setattr(serving._overload_control, "_unknown_delay_s", 0.3)
        monkeypatch.setattr(serving, "generate", generate_and_notice)
        occupying = Answer(other)
        producer, _ = await full.pair.next_requests()
        answer = Answer(client)
        await first.begin(answer, "ab")
        await first.die()
        await asyncio.wait_for(has_refused.wait(), _TIMEOUT_S)
        full.pair.prefill.send(producer, 0, "x", finish_reason=LENGTH)
        await occupying.wait_over()
        await full.finish("cd")
        assert asyncio.get_running_loop().time() - refused[0] > 0.25
        await answer.wait_over()
    assert answer.text == "abcd"


async def test_what_is_the_requests_own_fault_is_not_asked_elsewhere() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
            await anext(client.generate("hello", temperature=-1.0))
        answer = Answer(client)
        consumer = await first.begin(answer, "ab")
        first.pair.decode.send(consumer, 2, "", finish_reason=FinishReason.ERROR, error="NaN in its logits")
        with pytest.raises(CallFailed, match="INTERNAL"):
            await answer.wait_over()
    assert second.pair.decode.submitted == []


async def test_a_stream_that_may_not_be_resumed_tells_its_caller() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client, resume=False)
        await first.begin(answer, "ab")
        await first.die()
        with pytest.raises(CallFailed) as raised:
            await answer.wait_over()
    assert raised.value.is_passing
    assert second.pair.decode.submitted == []


async def test_a_reader_that_leaves_a_resumed_stream_aborts_it() -> None:
    async with ingresses(2) as (first, second), GenerateClient([first.address, second.address]) as client:
        answer = Answer(client)
        await first.begin(answer, "ab")
        await first.die()
        await second.begin(answer, "c")
        answer.task.cancel()
        await asyncio.gather(answer.task, return_exceptions=True)
        await asyncio.wait_for(second.pair.decode.has_aborted.wait(), _TIMEOUT_S)


class _LostAtTheEnd(generate_pb2_grpc.GenerateServiceServicer):
    """Its connection breaks between the last response and the call's own end."""

    num_calls = 0

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        self.num_calls += 1
        await context.write(generate_pb2.GenerateResponse(text="a", token_ids=[97]))
        end = generate_pb2.FINISH_REASON_LENGTH
        await context.write(
            generate_pb2.GenerateResponse(text="b", token_ids=[98], first_position=1, finish_reason=end)
        )
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")


async def test_a_stream_that_is_complete_is_not_resumed() -> None:
    server, servicer = grpc.aio.server(), _LostAtTheEnd()
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with GenerateClient(f"127.0.0.1:{port}") as client:
        answer = Answer(client)
        await answer.wait_over()
    await server.stop(0)
    assert (answer.text, servicer.num_calls) == ("ab", 1)


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="at least one ingress"):
        GenerateClient(" , ")
