"""The rows of LoRA adapters: alone, under a grammar, and with several samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from actors.config import EngineConfig
from actors.lora_config import LoraConfig
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest
from cluster.requests.serving import Serving
from tests.adapters import adapted_tokens, make_adapter, merged_checkpoint
from tests.features.feature import EVERYWHERE, Feature, Generated, Scenario, Setup
from tests.integration.promises import token_ids_of
from tests.reference import random_prompt
from tests.structured import KINDS, constrained_tokens

EVERY_LAYER: Final = "LoRA: every linear layer"
SOME_LAYERS: Final = "LoRA: some layers, scaled by the root of the rank"
GRAMMAR: Final = "LoRA: under a grammar"
SAMPLES: Final = "LoRA: several samples of a prompt (n)"
ROWS: Final = (EVERY_LAYER, SOME_LAYERS, GRAMMAR, SAMPLES)

_ADAPTERS: Final[dict[str, dict[str, Any]]] = {
    "every": {"r": 8},
    "some": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
}
_NUM_TOKENS: Final = 16
_NUM_STRUCTURED_TOKENS: Final = 80
_PROMPT: Final = random_prompt(30)
_GREEDY: Final = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class AdaptedSamples:
    """Greedy ones: all of them are the same."""

    expected: Sequence[int]
    name: str = SAMPLES
    scenarios: frozenset[Scenario] = EVERYWHERE
    num_streams: int = 2

    async def visit(self, serving: Serving) -> None:
        each = GenerateRequest(prompt=None, sampling=_GREEDY, lora_name="some")
        request = GenerateManyRequest(prompts=[TokenPrompt(_PROMPT)], n=self.num_streams, each=each)
        samples: list[list[GenerateChunk]] = [[] for _ in range(self.num_streams)]
        async with asyncio.timeout(60), aclosing(serving.generate_many(request)) as chunks:
            async for one in chunks:
                samples[one.sample_index].append(one.chunk)
        assert [token_ids_of(sample) for sample in samples] == [self.expected] * self.num_streams


def prepare_lora(config: EngineConfig, checkpoint: Path) -> Setup:
    """config: of engines with grammars."""
    root = Path(f"{checkpoint}-adapters")
    for seed, (name, settings) in enumerate(_ADAPTERS.items()):
        if not (root / name).exists():
            make_adapter(checkpoint, root / name, seed=seed, **settings)
    every, some = (adapted_tokens(checkpoint, root / name, _PROMPT, _NUM_TOKENS) for name in _ADAPTERS)
    form = KINDS["regex"]
    structured = SamplingOptions(temperature=0.0, max_tokens=_NUM_STRUCTURED_TOKENS, structured_output=form)
    merged = merged_checkpoint(checkpoint, root / "every")
    formed = constrained_tokens(merged, _PROMPT, form, _NUM_STRUCTURED_TOKENS)
    features: list[Feature] = [
        _generated(EVERY_LAYER, "every", _GREEDY, every),
        _generated(SOME_LAYERS, "some", _GREEDY, some),
        _generated(GRAMMAR, "every", structured, formed),
        AdaptedSamples(some),
    ]
    return Setup(config.model_copy(update={"lora": LoraConfig(allowed_directories=(str(root),))}), features)


def _generated(name: str, adapter: str, sampling: SamplingOptions, expected: list[int]) -> Generated:
    request = GenerateRequest(prompt=TokenPrompt(_PROMPT), sampling=sampling, lora_name=adapter)
    return Generated(name, request, partial(_assert_tokens, expected))


def _assert_tokens(expected: list[int], chunks: list[GenerateChunk]) -> None:
    assert token_ids_of(chunks) == expected
