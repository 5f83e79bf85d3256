"""A prompt of embeddings as a row of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.parameters.generation import EmbedsPrompt, GenerateChunk, GenerateRequest
from cluster.parameters.sampling_options import SamplingOptions
from tests.features.feature import Generated
from tests.integration.promises import NUM_TOKENS, token_ids_of
from tests.reference import greedy_tokens_after, random_embeds

PROMPT_EMBEDS: Final = "prompt_embeds"


def prompt_embeds_of(directory: Path) -> Generated:
    """The row, for this checkpoint: greedy output is compared with generate(inputs_embeds=...)."""
    embeds = random_embeds(directory, 37)
    expected = greedy_tokens_after(directory, embeds, NUM_TOKENS)
    prompt = EmbedsPrompt(embeds.numpy().tobytes(), len(embeds), embeds.shape[1], "float32")
    sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def check(chunks: list[GenerateChunk]) -> None:
        assert token_ids_of(chunks) == expected

    return Generated(PROMPT_EMBEDS, GenerateRequest(prompt=prompt, sampling=sampling), check)
