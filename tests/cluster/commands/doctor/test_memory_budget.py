"""The doctor computes from headers what an engine has once it has loaded the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.config import EngineConfig
from actors.model.loaded_runner import LoadedRunner
from cluster.checks.checkpoint_files import Weight
from cluster.commands.doctor.checkpoint import Checkpoint, read_checkpoint
from cluster.commands.doctor.findings import GIB, Verdict
from cluster.commands.doctor.memory_budget import (
    GPU_MEMORY_GIB,
    activation_bytes,
    check_budget,
    plan_memory,
    weight_bytes,
)


def _engine(directory: Path, **settings: Any) -> EngineConfig:
    # Packed weights have the same size, but are no parameters of the modules that could be counted.
    model = {"model": str(directory), "dtype": "float32", "weight_packing": "none"}
    return EngineConfig.model_validate({"model": model, **settings})


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_weights_and_blocks_are_those_of_the_engine(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    config = _engine(directory, cache={"kv_cache_memory_gib": 0.01})
    loaded = LoadedRunner.load(config.model, config.cache, config.scheduler, config.parallel)
    read, findings = read_checkpoint(directory)
    assert read is not None, findings

    budget = plan_memory(read, config, 4 * GIB, is_gpu=False)

    weights = loaded.model.forward.model.parameters()
    assert budget.weight_bytes == sum(parameter.nbytes for parameter in weights)
    assert budget.num_blocks == loaded.determine_num_blocks()
    assert budget.max_model_len == loaded.model.max_model_len


def _large(**config: Any) -> Checkpoint:
    """A checkpoint as large as Llama-3.1-70B."""
    text = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        **config,
    }
    layer = (8192 * 8192 * 2 + 8192 * 1024 * 2 + 8192 * 28672 * 3) * 80
    names = {"model.embed_tokens.weight": (128256, 8192), "lm_head.weight": (128256, 8192), "layers": (layer, 1)}
    return Checkpoint(Path("large"), text, tuple(Weight(name, shape) for name, shape in names.items()))


def _on_gpu(tp_size: int, **model: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"model": "large", **model},
            "cache": {"memory_fraction": 0.9},
            "parallel": {"tensor_parallel_size": tp_size},
        }
    )


def test_ranks_share_matrices_and_each_keeps_all_embeddings() -> None:
    whole, half = (weight_bytes(_large(), _on_gpu(tp_size)) for tp_size in (1, 2))
    embeddings = 128256 * 8192 * 2

    assert whole == pytest.approx(141.1e9, rel=0.01)  # 70.6 billion parameters, by its model card
    assert half == (whole - embeddings) // 2 + embeddings


def test_tied_embeddings_count_once() -> None:
    untied, tied = (weight_bytes(_large(tie_word_embeddings=is_tied), _on_gpu(1)) for is_tied in (False, True))

    assert untied - tied == 128256 * 8192 * 2


def test_a_token_of_kv_has_the_size_that_its_heads_give() -> None:
    sizes = [
        plan_memory(_large(), _on_gpu(tp_size, max_model_len=4096), 300 * GIB, is_gpu=True).block_size_bytes // 16
        for tp_size in (1, 4, 8)
    ]

    # 80 layers, keys and values, 8 heads of 128, 2 bytes.
    assert sizes == [80 * 2 * 8 * 128 * 2 // share for share in (1, 4, 8)]


def test_a_model_that_does_not_fit_is_told_the_ranks_that_it_takes() -> None:
    h200 = int(GPU_MEMORY_GIB["h200"] * GIB)
    finding = check_budget("decode", _large(), _on_gpu(1), h200, is_gpu=True)

    assert (finding.check, finding.verdict) == ("memory of decode engines", Verdict.FAILURE)
    assert finding.advice == "parallel.tensor_parallel_size = 2 fits"
    assert check_budget("decode", _large(), _on_gpu(2), h200, is_gpu=True).verdict is not Verdict.FAILURE


def test_a_model_that_fits_only_for_shorter_sequences_is_told_how_long() -> None:
    engine = EngineConfig.model_validate(
        {"model": {"model": "large"}, "parallel": {"tensor_parallel_size": 8}, "cache": {"memory_fraction": 0.5}}
    )
    finding = check_budget("decode", _large(), engine, 26 * GIB, is_gpu=True)

    assert finding.verdict is Verdict.FAILURE
    # A token takes 40 KiB on each rank, 131072 of them 5 GiB; half of what 18.2 GiB of weights leave is 3 GiB.
    assert finding.advice == "model.max_model_len = 65536 fits"


def test_heads_that_cannot_be_shared_are_found() -> None:
    finding = check_budget("decode", _large(num_key_value_heads=6), _on_gpu(4), 80 * GIB, is_gpu=True)

    assert (finding.verdict, finding.found[:40]) == (Verdict.FAILURE, "6 KV heads cannot be shared by 4 ranks: ")


def test_blocks_that_are_given_as_a_number_must_fit_too() -> None:
    engine = _on_gpu(8).model_copy(update={"cache": _on_gpu(8).cache.model_copy(update={"num_blocks": 10**6})})
    finding = check_budget("decode", _large(), engine, 80 * GIB, is_gpu=True)

    assert finding.verdict is Verdict.FAILURE
    assert "for 1000000 blocks, but only" in finding.found


def test_longer_batches_take_more_for_activations() -> None:
    short, long = (
        EngineConfig.model_validate({"model": {"model": "m"}, "scheduler": {"max_num_batched_tokens": number}})
        for number in (512, 8192)
    )

    assert activation_bytes(_large(), long) > 5 * activation_bytes(_large(), short)


def test_a_nested_text_config_is_used(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    text = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")

    nested, flat = read_checkpoint(tmp_path)[0], read_checkpoint(directory)[0]
    assert nested is not None
    assert flat is not None
    assert (nested.num_heads, nested.num_layers) == (flat.num_heads, flat.num_layers)
