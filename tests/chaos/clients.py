"""The clients: what each was told, when, and whether that was right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

import grpc

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import CallFailed, GenerateClient
from tests.chaos.answers import Asked
from tests.chaos.visits import PATIENCE_S, Question, Visit

_GRACE_S: Final = 30.0
"""A call that has not ended so long after its deadline hangs."""


_RETRY_DELAY_S: Final = 0.2
_ON_THE_WAY_S: Final = 0.1
"""Output that has left an engine may still come for so long after the engine was hit."""


class Outcome(StrEnum):
    """How a visit ended."""

    COMPLETED = "completed"
    LEFT = "left early"
    DEADLINE = "own deadline passed"
    GIVEN_UP = "given up"
    """Two engines were lost with it, which may be its own fault."""
    FAILED = "failed"
    WRONG = "wrong"
    """A token was wrong, lost, or came twice."""
    HUNG = "hung"
    """Past its deadline."""


FAULTS_OF_OURS: Final = (Outcome.FAILED, Outcome.WRONG, Outcome.HUNG)
"""Outcomes that must never be, whatever happens to the cluster."""


@dataclass(slots=True)
class VisitResult:
    """One visit as its client saw it. Times are monotonic seconds.

    told_s:              when it was sent, and when each response came
    num_computed_tokens: tokens whose KV was computed for its last attempt
    """

    request_id: str
    sent_s: float
    ended_s: float = 0.0
    outcome: Outcome | None = None
    error: str = ""
    num_tokens: int = 0
    told_s: list[float] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def longest_pause_s(self) -> float:
        """Between two responses, or before the first."""
        return max((later_s - earlier_s for earlier_s, later_s in pairwise(self.told_s)), default=0.0)

    def pause_at_s(self, at_s: float) -> float | None:
        """The pause that something made which happened then; None if the last response had come."""
        pauses = [
            later_s - earlier_s
            for earlier_s, later_s in pairwise(self.told_s)
            if earlier_s < at_s + _ON_THE_WAY_S and later_s > at_s
        ]
        return max(pauses, default=None)


class Clients:
    """Clients of a cluster."""

    def __init__(self, client: GenerateClient, asked: Sequence[Asked], name: str) -> None:
        """name: begins the ids of their requests."""
        self._client = client
        self._asked = asked
        self._name = name
        self.results: list[VisitResult] = []

    async def come(self, visits: Iterator[Visit], num_visits: int, is_over: asyncio.Event) -> None:
        """Let visits come at their times: so many, and more until is_over is set; returns when the last has ended."""
        async with asyncio.TaskGroup() as tasks:
            for visit in visits:
                if visit.number >= num_visits and is_over.is_set():
                    return
                await asyncio.sleep(visit.after_s)
                result = VisitResult(f"{self._name}-{visit.number}", time.monotonic())
                self.results.append(result)
                tasks.create_task(self._pay(visit, result))

    async def _pay(self, visit: Visit, result: VisitResult) -> None:
        try:
            async with (
                asyncio.timeout(visit.deadline_s + _GRACE_S),
                asyncio.timeout(visit.leaves_after_s) as leaving,
            ):
                await self._read(visit, result)
            result.outcome = Outcome.COMPLETED
        except TimeoutError:
            result.outcome = Outcome.LEFT if leaving.expired() else Outcome.HUNG
        except CallFailed as error:
            result.outcome, result.error = _outcome_of(error, visit), str(error)
        except AssertionError as error:
            result.outcome, result.error = Outcome.WRONG, str(error)
        result.ended_s = time.monotonic()

    async def _read(self, visit: Visit, result: VisitResult) -> None:
        asked = self._asked[visit.question]
        message = _request(asked.question, result.request_id, salt="" if visit.shares_prefix else result.request_id)
        last = generate_pb2.GenerateResponse()
        result.told_s.append(time.monotonic())
        async with aclosing(self._send(message, visit.deadline_s)) as responses:
            async for last in responses:
                result.told_s.append(time.monotonic())
                _check(last, result.num_tokens, asked.answer)
                result.num_tokens += len(last.token_ids)
        assert last.finish_reason == generate_pb2.FINISH_REASON_LENGTH, f"the stream ended without a reason: {last}"
        assert result.num_tokens == len(asked.answer), f"{result.num_tokens} tokens, not {len(asked.answer)}"
        timings = last.timings
        result.num_computed_tokens = (
            timings.prefill_engine.computed_prompt_tokens + timings.decode_engine.computed_prompt_tokens
        )

    async def _send(
        self, message: generate_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """The answer; asked for again, as the API allows, while no ingress is there to take the request on."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            has_begun = False
            try:
                async with aclosing(self._client.send(message, deadline_s - time.monotonic())) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
                return
            except CallFailed as error:
                if has_begun or error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
                if time.monotonic() + _RETRY_DELAY_S >= deadline_s:
                    raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"nobody took it on: {error}") from error
            await asyncio.sleep(_RETRY_DELAY_S)


def _request(question: Question, request_id: str, salt: str) -> generate_pb2.GenerateRequest:
    """The question as a message. salt: keeps it from the cached KV of requests with another one."""
    return generate_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=generate_pb2.TokenIds(ids=question.prompt),
        sampling_params=generate_pb2.SamplingParams(**question.sampling),
        cache_salt=salt,
    )


def _check(response: generate_pb2.GenerateResponse, position: int, answer: Sequence[int]) -> None:
    token_ids = list(response.token_ids)
    if token_ids:
        assert response.first_position == position, f"position {response.first_position} came, not {position}"
    expected = list(answer[position : position + len(token_ids)])
    assert token_ids == expected, f"{token_ids} at position {position}, not {expected}"


def _outcome_of(error: CallFailed, visit: Visit) -> Outcome:
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and visit.deadline_s < PATIENCE_S:
        return Outcome.DEADLINE
    if error.code is grpc.StatusCode.INTERNAL and "engines died with the request" in str(error):
        return Outcome.GIVEN_UP
    return Outcome.FAILED
