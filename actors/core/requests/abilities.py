"""The abilities that a request needs of an engine, and those that an engine has."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from actors.core.requests.request import Request


class Ability(StrEnum):
    """An ability that a request may need and that not every engine has."""

    GENERATION = "a language head"
    HANDOFF = "handoffs"
    STRUCTURED_OUTPUT = "structured output"
    POOLING = "embeddings"
    CLASSIFICATION = "a classification head"
    LORA = "LoRA adapters"
    MULTIMODAL = "multimodal items"
    PROMPT_EMBEDS = "prompt embeddings"
    PROMPT_LOGPROBS = "prompt log-probabilities"


def engine_abilities(
    worker_abilities: Iterable[Ability], connector: object | None, structured_output: object | None
) -> frozenset[Ability]:
    """Return the abilities of the whole engine: handoffs need a KV connector too, and grammars a compiler.

    connector, structured_output: None if the engine has none
    """
    lacks = {Ability.HANDOFF: connector is None, Ability.STRUCTURED_OUTPUT: structured_output is None}
    return frozenset(ability for ability in worker_abilities if not lacks.get(ability, False))


def needed_abilities(request: Request) -> set[Ability]:
    """Return the abilities that an engine needs for a request."""
    params, pooling = request.sampling_params, request.pooling_params
    needs = {
        Ability.GENERATION: pooling is None,
        Ability.HANDOFF: request.kv_transfer_params is not None,
        Ability.STRUCTURED_OUTPUT: params.structured_output is not None,
        Ability.POOLING: pooling is not None and pooling.task == "embed",
        Ability.CLASSIFICATION: pooling is not None and pooling.task != "embed",
        Ability.LORA: request.lora_name is not None,
        Ability.MULTIMODAL: bool(request.mm_features),
        Ability.PROMPT_EMBEDS: request.prompt_embeds is not None,
        Ability.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    return {ability for ability, is_needed in needs.items() if is_needed}
