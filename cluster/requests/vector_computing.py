"""All prompts of one call, side by side: a few of them at the engines at a time, so that others get their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from actors.core.requests.request import EngineCoreRequest
from cluster.parameters.generation import Usage
from cluster.requests.model_versions import EnginesOfVersion, ModelVersion
from cluster.requests.recovery import RecoveryPolicy
from cluster.requests.vector_recovery import PromptVector, VectorRecovery

MAX_PROMPTS_AT_ONCE: Final = 64
"""Of one call. An engine's queue knows no calls: a thousand prompts at once would be before all that come next."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vector for each prompt, in their order, all of one model version."""

    values: list[list[float]]
    usage: Usage
    model: ModelVersion


async def compute_vectors(
    engines: EnginesOfVersion, prompts: Sequence[EngineCoreRequest], deadline_s: float | None, policy: RecoveryPolicy
) -> Vectors:
    """Compute every prompt's vector. The first that fails ends all of them; so does cancelling it.

    deadline_s: on the event loop's clock
    Raises ModelVersionLeft, NoEngineAvailable, EngineFailed, DeadlineExceeded.
    """
    recovery = VectorRecovery(engines.model.router, engines, policy, deadline_s)
    turns = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)

    async def compute(prompt: EngineCoreRequest) -> PromptVector:
        async with turns:
            return await recovery.vector(prompt)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(compute(prompt)) for prompt in prompts]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    vectors = [task.result() for task in tasks]
    num_prompt_tokens = sum(vector.num_prompt_tokens for vector in vectors)
    usage = Usage(num_prompt_tokens, 0, sum(vector.num_cached_tokens for vector in vectors))
    return Vectors([vector.values for vector in vectors], usage, engines.model)


def scores_of(values: list[list[float]], num_documents: int) -> list[float]:
    """A score for each document, of what was computed for a ScoreRequest.

    That is one number for each of them, or the vectors of the query and of each of them, of length 1.
    """
    if len(values) == num_documents:
        return [score for [score] in values]
    query, *documents = values
    return [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
