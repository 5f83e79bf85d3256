"""Several samples of a prompt as a row of the table."""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.api.protos.sample_seeds import sample_seed
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest
from cluster.requests.serving import Serving
from tests.features.feature import EVERYWHERE, Scenario
from tests.integration.promises import Answers, ask_all, assert_same, engines_config
from tests.integration.recovering_cluster import recovering_cluster
from tests.reference import random_prompt

SAMPLES: Final = "several samples of a prompt (n)"
_NUM_SAMPLES: Final = 3
_SEED: Final = 5
_PROMPT: Final = TokenPrompt(random_prompt(29))


@dataclass(frozen=True, slots=True)
class Samples:
    """Each of them has to be what it is alone."""

    alone: Answers
    name: str = SAMPLES
    scenarios: frozenset[Scenario] = EVERYWHERE
    num_streams: int = _NUM_SAMPLES

    async def visit(self, serving: Serving) -> None:
        each = GenerateRequest(prompt=None, request_id="samples", sampling=_sampling(_SEED), cache_salt="samples")
        request = GenerateManyRequest(prompts=[_PROMPT], n=_NUM_SAMPLES, each=each)
        samples: list[list[GenerateChunk]] = [[] for _ in range(_NUM_SAMPLES)]
        async with asyncio.timeout(60), aclosing(serving.generate_many(request)) as chunks:
            async for one in chunks:
                samples[one.sample_index].append(one.chunk)
        for (name, expected), sample in zip(self.alone.items(), samples, strict=True):
            assert_same(name, sample, expected)


@functools.cache
def samples_of(directory: Path) -> Samples:
    """The row, for this checkpoint."""
    return asyncio.run(_ask_alone(directory))


async def _ask_alone(directory: Path) -> Samples:
    requests = {
        f"sample {index}": GenerateRequest(
            prompt=_PROMPT,
            request_id=f"sample {index}",
            sampling=_sampling(sample_seed(_SEED, index)),
            cache_salt=f"sample {index}",
        )
        for index in range(_NUM_SAMPLES)
    }
    async with recovering_cluster(engines_config(directory), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        return Samples(await ask_all(cluster, requests))


def _sampling(seed: int) -> SamplingOptions:
    return SamplingOptions(temperature=1.1, seed=seed, max_tokens=14, ignore_eos=True)
