"""The clients: what each was told, when, and whether that was right."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc

from cluster.client import CallFailed, GenerateClient
from cluster.ingress.protos.raypd.v1 import generate_pb2
from tests.chaos.resuming import send_and_resume
from tests.chaos.visits import PATIENCE_S, Question, Visit
from tests.reference import greedy_tokens

_GRACE_S: Final = 5.0
"""A call that has not ended so long after its deadline hangs."""


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
"""What must never be, whatever happens to the cluster."""


@dataclass(slots=True)
class VisitResult:
    """One visit as its client saw it.

    longest_pause_s:     between two responses, or before the first
    num_computed_tokens: tokens whose KV was computed for its last attempt
    """

    request_id: str
    outcome: Outcome | None = None
    error: str = ""
    num_tokens: int = 0
    longest_pause_s: float = 0.0
    num_computed_tokens: int = 0


class Clients:
    """Clients of one ingress; answers[i] is the right answer to questions[i]."""

    def __init__(
        self, address: str, questions: Sequence[Question], answers: Sequence[Sequence[int]], name: str
    ) -> None:
        """name: begins the ids of their requests."""
        self._address = address
        self._questions = questions
        self._answers = answers
        self._name = name
        self.results: list[VisitResult] = []

    async def come(self, visits: Iterator[Visit], num_visits: int, is_over: asyncio.Event) -> None:
        """Let visits come at their times: so many, and more until is_over is set; returns when the last has ended."""
        async with asyncio.TaskGroup() as tasks:
            for visit in visits:
                if visit.number >= num_visits and is_over.is_set():
                    return
                await asyncio.sleep(visit.after_s)
                result = VisitResult(f"{self._name}-{visit.number}")
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

    async def _read(self, visit: Visit, result: VisitResult) -> None:
        question, answer = self._questions[visit.question], self._answers[visit.question]
        message = request_for(question, result.request_id, salt="" if visit.shares_prefix else result.request_id)
        last, last_s = generate_pb2.GenerateResponse(), time.monotonic()
        async with aclosing(send_and_resume(self._address, message, visit.deadline_s)) as responses:
            async for last in responses:
                now_s = time.monotonic()
                result.longest_pause_s, last_s = max(result.longest_pause_s, now_s - last_s), now_s
                _check(last, result.num_tokens, answer)
                result.num_tokens += len(last.token_ids)
        assert last.finish_reason == generate_pb2.FINISH_REASON_LENGTH, f"the stream ended without a reason: {last}"
        assert result.num_tokens == len(answer), f"{result.num_tokens} tokens, not {len(answer)}"
        timings = last.timings
        result.num_computed_tokens = (
            timings.prefill_engine.computed_prompt_tokens + timings.decode_engine.computed_prompt_tokens
        )

    def count_outcomes(self) -> Counter[Outcome]:
        """How many visits ended in each way; all of them have ended."""
        return Counter(result.outcome for result in self.results if result.outcome is not None)


async def learn_answers(
    client: GenerateClient, questions: Sequence[Question], model_directory: Path
) -> list[list[int]]:
    """The right answers: greedy ones by transformers' generate(), sampled ones by the cluster, while all is well."""
    sampled = [question for question in questions if question.sampling_seed is not None]
    told = await asyncio.gather(*(_ask(client, question) for question in sampled))
    answers = dict(zip(sampled, told, strict=True))
    for question in questions:
        if question.sampling_seed is None:
            answers[question] = await asyncio.to_thread(
                greedy_tokens, model_directory, question.prompt, question.num_tokens
            )
    return [answers[question] for question in questions]


def request_for(question: Question, request_id: str, salt: str) -> generate_pb2.GenerateRequest:
    """The question as a message. salt: keeps it from the cached KV of requests with another one."""
    return generate_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=generate_pb2.TokenIds(ids=question.prompt),
        sampling_params=generate_pb2.SamplingParams(**question.sampling),
        cache_salt=salt,
    )


async def _ask(client: GenerateClient, question: Question) -> list[int]:
    token_ids: list[int] = []
    async with aclosing(client.send(request_for(question, "", ""), PATIENCE_S)) as responses:
        async for response in responses:
            token_ids.extend(response.token_ids)
    assert len(token_ids) == question.num_tokens
    return token_ids


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
