"""Computes the vectors of all prompts of one call, a limited number at a time, so that other calls get their turn.

A prompt has the same recovery as a request for tokens. But a vector comes in one piece, so that another engine has to
compute a prompt from its start if the first engine fails.
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
from cluster.vectors.all_together import all_together
from cluster.vectors.vector_engines import VectorRouter

MAX_PROMPTS_AT_ONCE: Final = 64
"""The limit for one call. An engine's queue knows no calls: all others would wait behind a thousand prompts of one."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of a call's prompts, in the prompts' order, all of one model version."""

    values: list[list[float]]
    usage: Usage
    model: ModelVersion


@dataclass(frozen=True, slots=True)
class _PromptVector:
    """The vector of one prompt.

    num_cached_tokens: how many tokens of the prompt came from a prefix cache
    """

    values: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


async def compute_vectors(
    engines: EnginesOfVersion, prompts: Sequence[EngineCoreRequest], deadline_s: float | None, policy: RecoveryPolicy
) -> Vectors:
    """Compute every prompt's vector. The first failure aborts all prompts, and so does cancelling the call.

    deadline_s: when the client stops waiting, on the event loop's clock; None if it has no deadline
    Raises ModelVersionLeft, NoEngineAvailable, EngineFailed, DeadlineExceeded.
    """
    router, turns, running = VectorRouter(engines.model.router), Turns(), asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)

    async def compute(prompt: EngineCoreRequest) -> _PromptVector:
        async with running:
            await turns.next()
            return await _vector_of(prompt, Recovery(router, engines, prompt, deadline_s, policy))

    vectors = await all_together(compute(prompt) for prompt in prompts)
    num_prompt_tokens = sum(vector.num_prompt_tokens for vector in vectors)
    usage = Usage(num_prompt_tokens, 0, sum(vector.num_cached_tokens for vector in vectors))
    return Vectors([vector.values for vector in vectors], usage, engines.model)


async def _vector_of(prompt: EngineCoreRequest, recovery: Recovery) -> _PromptVector:
    """Read a prompt's outputs up to the last one, which has the vector. Raises EngineFailed if that has none."""
    last: EngineCoreOutput | None = None
    async with aclosing(recovery.outputs()) as outputs:
        async for output in outputs:
            last = output
    if last is None or last.pooling_output is None:
        raise _failed(prompt, "the engine ended the request without a vector")
    if not math.isfinite(sum(last.pooling_output)):
        raise _failed(prompt, "the vector that the model computed for this prompt has numbers that are not finite")
    num_prompt_tokens = len(prompt.prompt_token_ids)
    num_cached_tokens = 0 if last.timings is None else last.timings.num_cached_tokens
    return _PromptVector(last.pooling_output, num_prompt_tokens, min(num_cached_tokens, num_prompt_tokens))


def _failed(prompt: EngineCoreRequest, reason: str) -> EngineFailed:
    return EngineFailed(prompt.request_id, reason, num_new_tokens=0, can_resume=False)


def scores_of(values: list[list[float]], num_documents: int) -> list[float]:
    """Return a score for each document of a ScoreRequest.

    values: one number for each document, or the vectors of the query and of each document, all of length 1
    """
    if len(values) == num_documents:
        return [score for [score] in values]
    query, *documents = values
    return [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
