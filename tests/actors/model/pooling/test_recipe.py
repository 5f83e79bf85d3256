"""The recipe for vectors, from a checkpoint's own files.

Tests of actors/checkpoint/pooling_facts.py, actors/model/config/model_kind.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.model.config.model_kind import ModelKind, kind_of
from actors.model.errors import CheckpointError
from actors.model.pooling.recipe import read_pooling_facts
from tests.pooled import write_pipeline

SWITCHES = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
FULL = ("Transformer", "Pooling", "Normalize")


def facts_of(directory: Path, kind: ModelKind = ModelKind.EMBEDDING, **settings: Any) -> PoolingFacts:
    return read_pooling_facts(directory, LlamaConfig(**settings), kind, 48)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", ModelKind.GENERATION),
        ("LlamaModel", ModelKind.EMBEDDING),
        ("LlamaForSequenceClassification", ModelKind.CLASSIFICATION),
        ("SomethingElse", ModelKind.GENERATION),
    ],
)
def test_the_class_that_a_checkpoint_names_says_what_it_is_for(architecture: str, kind: ModelKind) -> None:
    assert kind_of(LlamaConfig(architectures=[architecture])) is kind
    assert kind_of(LlamaConfig()) is ModelKind.GENERATION


def test_without_files_the_last_token_is_taken_and_normalized(tmp_path: Path) -> None:
    assert facts_of(tmp_path) == PoolingFacts(embedding_size=48, pooling="last", normalize=True)


@pytest.mark.parametrize(
    ("settings", "parts", "pooling", "normalize"),
    [
        (SWITCHES, FULL, "mean", True),
        (SWITCHES, FULL[:2], "mean", False),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, FULL, "last", True),
        ({"pooling_mode": "cls"}, FULL, "cls", True),
    ],
)
def test_a_pipeline_says_how_vectors_are_made(
    settings: dict[str, Any], parts: tuple[str, ...], pooling: Any, normalize: bool, tmp_path: Path
) -> None:
    write_pipeline(tmp_path, settings, *parts)
    facts = facts_of(tmp_path, matryoshka_dimensions=[32, 16])
    assert facts == PoolingFacts(
        embedding_size=48, pooling=pooling, normalize=normalize, matryoshka_dimensions=(16, 32)
    )


@pytest.mark.parametrize(
    ("settings", "parts", "why"),
    [
        (SWITCHES, ("Transformer", "Pooling", "Dense"), "Transformer -> Pooling -> Dense; served is Transformer"),
        (SWITCHES | {"pooling_mode_max_tokens": True}, FULL, "pooling_mode_mean_tokens and pooling_mode_max_tokens"),
        ({}, FULL, "its pooling is not named"),
        (SWITCHES | {"include_prompt": False}, FULL, "leaves out a prompt's tokens"),
    ],
)
def test_a_pipeline_that_is_not_served_whole_is_not_served(
    settings: dict[str, Any], parts: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    write_pipeline(tmp_path, settings, *parts)
    facts = facts_of(tmp_path)
    assert facts.embedding_size == 0
    assert why in facts.why_no_embeddings


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_pipeline(tmp_path, None, *FULL)
    with pytest.raises(CheckpointError, match=r"1_Pooling has no config\.json"):
        facts_of(tmp_path)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="not a list of modules"):
        facts_of(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        facts_of(tmp_path)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"num_labels": 2, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_scores_are_made_as_the_head_was_trained(settings: dict[str, Any], activation: str, tmp_path: Path) -> None:
    facts = facts_of(tmp_path, ModelKind.CLASSIFICATION, **settings)
    assert facts.activation == activation
    assert facts.labels == tuple(f"LABEL_{index}" for index in range(settings["num_labels"]))
    assert facts.embedding_size == 0


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"activation torch\.nn\.Tanh"):
        facts_of(tmp_path, ModelKind.CLASSIFICATION, sbert_ce_default_activation_function="torch.nn.Tanh")
