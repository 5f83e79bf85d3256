"""The facts of a served model, as an ingress needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from actors.checkpoint.generation_defaults import NO_DEFAULTS, GenerationDefaults
from actors.checkpoint.pooling_facts import PoolingFacts
from actors.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts of the served model that an ingress works with.

    max_model_len: the most tokens of prompt and output together; the KV cache of every engine has room for them
    vocab_size:    the size of the model's vocabulary, which can be larger than the tokenizer's
    generates:     whether the model generates tokens; if not, it has vectors only
    pooling:       the facts of the model's vectors; None if it has none
    prompt_embeds_size: the size of one token's embedding; 0 if prompts cannot be embeddings
    dtype:         the type that a prompt's embeddings are cast to
    defaults:      the sampling parameters of requests that do not give them
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generates: bool = True
    pooling: PoolingFacts | None = None
    prompt_embeds_size: int = 0
    dtype: str = "float32"
    defaults: GenerationDefaults = NO_DEFAULTS

    @classmethod
    def of(cls, name: str, facts: ModelFacts, defaults: GenerationDefaults = NO_DEFAULTS) -> Self:
        """Put together an engine's report of the model that it has loaded, and the checkpoint's defaults."""
        return cls(
            name,
            facts.max_model_len,
            facts.vocab_size,
            facts.eos_token_ids,
            facts.generates,
            facts.pooling,
            facts.prompt_embeds_size,
            facts.dtype,
            defaults,
        )
