"""Embeddings and classes as rows of the table. Prefill engines alone give them: nothing is handed over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoModelForSequenceClassification

from actors.config import EngineConfig
from actors.core.requests.sampling_params import Pooling
from cluster.parameters.generation import TokenPrompt
from cluster.requests.serving import Serving
from cluster.vectors.vector_requests import ClassifyRequest, EmbedRequest
from kv_transfer.config import KVTransferConfig
from tests.checkpoints import make_checkpoint
from tests.engine_pair import engine_config
from tests.features.feature import CheckpointOf, Scenario, Setup
from tests.pooled import embedding_of, logits_of
from tests.reference import random_prompt

EMBEDDINGS: Final[dict[Pooling, str]] = {
    "last": "embeddings: last token, cut to dimensions",
    "mean": "embeddings: mean",
    "cls": "embeddings: first token, not normalized",
}
CLASSES: Final = "classification heads"
_SCENARIOS: Final = frozenset({Scenario.PREFILL_ONLY, Scenario.PREEMPTED, Scenario.RESUMED, Scenario.OVERLAPPED})
_PROMPTS: Final = [random_prompt(20 + 15 * index, seed=index) for index in range(3)]
_INPUTS: Final = [TokenPrompt(prompt) for prompt in _PROMPTS]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Each input's vector has to be transformers' own."""

    name: str
    pooling: Pooling
    directory: Path
    scenarios: frozenset[Scenario] = _SCENARIOS
    num_streams: int = 0

    async def visit(self, serving: Serving) -> None:
        normalize, dimensions = self.pooling != "cls", 16 if self.pooling == "last" else None
        result = await serving.embed(
            EmbedRequest(inputs=_INPUTS, pooling=self.pooling, normalize=normalize, dimensions=dimensions)
        )
        for prompt, vector in zip(_PROMPTS, result.embeddings, strict=True):
            expected = embedding_of(self.directory, prompt, self.pooling, normalize=normalize, dimensions=dimensions)
            assert vector == pytest.approx(expected, abs=2e-5)


@dataclass(frozen=True, slots=True)
class Classified:
    """Each input's scores have to be transformers' own."""

    directory: Path
    name: str = CLASSES
    scenarios: frozenset[Scenario] = _SCENARIOS
    num_streams: int = 0

    async def visit(self, serving: Serving) -> None:
        result = await serving.classify(ClassifyRequest(inputs=_INPUTS))
        for prompt, scores in zip(_PROMPTS, result.scores, strict=True):
            assert scores == pytest.approx(logits_of(self.directory, prompt).softmax(-1).tolist(), abs=2e-5)


def prepare_embeddings(checkpoint: CheckpointOf) -> Setup:
    """A model that generates, asked for vectors."""
    directory = checkpoint("llama")
    return Setup(_engines(directory), [Embedded(name, pooling, directory) for pooling, name in EMBEDDINGS.items()])


def prepare_classes(checkpoint: CheckpointOf) -> Setup:
    """A model that does nothing else."""
    directory = checkpoint("llama").with_name("llama-classifier")
    if not directory.exists():
        make_checkpoint("llama", directory, auto_class=AutoModelForSequenceClassification, num_labels=3)
    return Setup(_engines(directory), [Classified(directory)])


def _engines(directory: Path) -> EngineConfig:
    tcp = KVTransferConfig(transport="tcp")
    return engine_config(directory, block_size=8, max_num_batched_tokens=32, transfer=tcp)
