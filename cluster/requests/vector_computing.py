"""All prompts of one call, side by side: a few of them at the engines at a time, so that others get their turn.

A vector comes in one piece, so there is nothing to go on from: a prompt that an engine lost is computed from its start
by another one, by the same recovery as requests for tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import EngineFailed
from cluster.parameters.generation import Usage
from cluster.requests.model_versions import EnginesOfVersion, ModelVersion
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.turns import Turns
from cluster.vectors.vector_engines import VectorRouter

MAX_PROMPTS_AT_ONCE: Final = 64
"""The limit for one call. An engine's queue knows no calls: a thousand prompts at once would be before all others."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vector for each prompt, in their order, all of one model version."""

    values: list[list[float]]
    usage: Usage
    model: ModelVersion


@dataclass(frozen=True, slots=True)
class _PromptVector:
    """num_cached_tokens: those tokens of the prompt that came from a prefix cache"""

    values: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


async def compute_vectors(
    engines: EnginesOfVersion, prompts: Sequence[EngineCoreRequest], deadline_s: float | None, policy: RecoveryPolicy
) -> Vectors:
    """Compute every prompt's vector. The first that fails ends all of them; so does cancelling it.

    deadline_s: on the event loop's clock
    Raises ModelVersionLeft, NoEngineAvailable, EngineFailed, DeadlineExceeded.
    """
    router, turns, running = VectorRouter(engines.model.router), Turns(), asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)

    async def compute(prompt: EngineCoreRequest) -> _PromptVector:
        async with running:
            await turns.next()
            return await _vector_of(prompt, Recovery(router, engines, prompt, deadline_s, policy))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(compute(prompt)) for prompt in prompts]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    vectors = [task.result() for task in tasks]
    num_prompt_tokens = sum(vector.num_prompt_tokens for vector in vectors)
    usage = Usage(num_prompt_tokens, 0, sum(vector.num_cached_tokens for vector in vectors))
    return Vectors([vector.values for vector in vectors], usage, engines.model)


async def _vector_of(prompt: EngineCoreRequest, recovery: Recovery) -> _PromptVector:
    """Read a prompt's outputs up to the last one, which brings the vector."""
    last: EngineCoreOutput | None = None
    async with aclosing(recovery.outputs()) as outputs:
        async for output in outputs:
            last = output
    if last is None or last.pooling_output is None:
        raise _failed(prompt, "its engine ended it without a vector")
    if not math.isfinite(sum(last.pooling_output)):
        raise _failed(prompt, "the model's numbers for this prompt are not finite")
    num_prompt_tokens = len(prompt.prompt_token_ids)
    num_cached_tokens = 0 if last.timings is None else last.timings.num_cached_tokens
    return _PromptVector(last.pooling_output, num_prompt_tokens, min(num_cached_tokens, num_prompt_tokens))


def _failed(prompt: EngineCoreRequest, reason: str) -> EngineFailed:
    return EngineFailed(prompt.request_id, reason, num_new_tokens=0, can_resume=False)


def scores_of(values: list[list[float]], num_documents: int) -> list[float]:
    """Return a score for each document, from what was computed for a ScoreRequest.

    That is one number for each of them, or the vectors of the query and of each of them, of length 1.
    """
    if len(values) == num_documents:
        return [score for [score] in values]
    query, *documents = values
    return [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
