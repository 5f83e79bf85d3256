"""A client knows right answers from wrong ones: judged on servers that do it wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.client import GenerateClient
from tests.chaos import clients
from tests.chaos.answers import Asked
from tests.chaos.clients import FAULTS_OF_OURS, Clients, Outcome, VisitResult
from tests.chaos.visits import PATIENCE_S, Question, Visit

_ASKED = Asked(Question(prompt=(5, 6), num_tokens=4, sampling_seed=None), answer=(11, 12, 13, 14))
_Context = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]


@dataclass(frozen=True)
class Call:
    """The messages that a server sends to one call, and how it ends it. code: None: never."""

    responses: Sequence[generate_pb2.GenerateResponse]
    code: grpc.StatusCode | None = grpc.StatusCode.OK
    message: str = ""


class Server(generate_pb2_grpc.GenerateServiceServicer):
    """Says to one call after the other what it is told to."""

    def __init__(self, *calls: Call) -> None:
        self._calls = iter(calls)
        self.requests: list[generate_pb2.GenerateRequest] = []

    async def Generate(self, request: generate_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """One call."""
        self.requests.append(request)
        call = next(self._calls)
        for response in call.responses:
            await context.write(response)
        if call.code is None:
            await asyncio.Event().wait()
        elif call.code is not grpc.StatusCode.OK:
            await context.abort(call.code, call.message)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    grpc_server = grpc.aio.server()
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(server, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await grpc_server.stop(None)


def say(position: int, *token_ids: int) -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(token_ids=token_ids, first_position=position)


def say_last(position: int, *token_ids: int) -> generate_pb2.GenerateResponse:
    reason = generate_pb2.FINISH_REASON_LENGTH
    return generate_pb2.GenerateResponse(token_ids=token_ids, first_position=position, finish_reason=reason)


async def visit(server: Server, leaves_after_s: float | None = None, deadline_s: float = PATIENCE_S) -> VisitResult:
    only = Visit(0, 0.0, 0, shares_prefix=True, leaves_after_s=leaves_after_s, deadline_s=deadline_s)
    over = asyncio.Event()
    over.set()
    async with serving(server) as address, GenerateClient(address) as client:
        come = Clients(client, [_ASKED], "test")
        await come.come(iter([only]), 1, over)
    [result] = come.results
    return result


async def test_the_right_answer_is_completed() -> None:
    result = await visit(Server(Call([say(0, 11), say(1, 12, 13), say_last(3, 14)])))
    assert (result.outcome, result.num_tokens, result.error) == (Outcome.COMPLETED, 4, "")


@pytest.mark.parametrize(
    "responses",
    [
        pytest.param([say(0, 11), say(1, 99)], id="another token"),
        pytest.param([say(0, 11), say(0, 11)], id="a token twice"),
        pytest.param([say(0, 11), say(2, 13)], id="a token lost"),
        pytest.param([say(0, 11), say_last(1, 12)], id="ended early"),
        pytest.param([say(0, 11, 12, 13, 14)], id="no end"),
        pytest.param([say(0, 11, 12, 13, 14), say_last(4, 15)], id="a token too many"),
    ],
)
async def test_what_differs_by_a_token_is_noticed(responses: Sequence[generate_pb2.GenerateResponse]) -> None:
    # The client library itself fails on some of it.
    assert (await visit(Server(Call(responses)))).outcome in FAULTS_OF_OURS


async def test_who_leaves_early_has_left() -> None:
    assert (await visit(Server(Call([say(0, 11)], code=None)), leaves_after_s=0.05)).outcome is Outcome.LEFT


async def test_a_short_deadline_may_pass_and_patience_may_not() -> None:
    assert (await visit(Server(Call([say(0, 11)], code=None)), deadline_s=0.05)).outcome is Outcome.DEADLINE
    late = Call([say(0, 11)], grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (await visit(Server(late))).outcome is Outcome.FAILED


async def test_a_stream_that_outlives_its_deadline_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC, which would end the stream at its deadline, has no chance to.
    monkeypatch.setattr(clients, "_GRACE_S", 0.1 - PATIENCE_S)
    assert (await visit(Server(Call([say(0, 11)], code=None)))).outcome is Outcome.HUNG


async def test_what_was_given_up_by_the_rule_is_told_from_what_failed() -> None:
    given_up = Call([], grpc.StatusCode.INTERNAL, "r: it is gone; 2 engines died with the request")
    assert (await visit(Server(given_up))).outcome is Outcome.GIVEN_UP
    assert (await visit(Server(Call([], grpc.StatusCode.INTERNAL, "a bug")))).outcome is Outcome.FAILED


async def test_a_request_that_nobody_takes_on_is_sent_again() -> None:
    server = Server(Call([], grpc.StatusCode.UNAVAILABLE), Call([say(0, 11, 12), say_last(2, 13, 14)]))
    assert (await visit(server)).outcome is Outcome.COMPLETED
    assert len(server.requests) == 2


async def test_a_request_that_nobody_takes_on_ends_at_its_deadline() -> None:
    refusals = [Call([], grpc.StatusCode.UNAVAILABLE)] * 10
    assert (await visit(Server(*refusals), deadline_s=0.3)).outcome is Outcome.DEADLINE


def test_a_pause_is_that_of_what_happened_in_it() -> None:
    result = VisitResult("r", sent_s=10.0, told_s=[10.0, 10.1, 13.1, 13.2, 14.2])
    assert result.longest_pause_s == pytest.approx(3.0)
    assert result.pause_at_s(12.0) == pytest.approx(3.0)
    assert result.pause_at_s(10.05) == pytest.approx(3.0), "one response was on its way when it happened"
    assert result.pause_at_s(13.15) == pytest.approx(1.0)
    assert result.pause_at_s(14.3) is None
