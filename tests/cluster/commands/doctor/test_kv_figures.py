"""The doctor's figures of a model's KV are those that its published config gives, and those of the engine's layout.

Tests of cluster/commands/doctor/state_figures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.config import CacheConfig, EngineConfig, ModelConfig
from actors.model.cache.kv_cache import make_layout
from actors.model.loaded_runner import LoadedRunner
from actors.model.loader import load_model
from cluster.commands.doctor.checkpoint import Checkpoint, read_checkpoint
from cluster.commands.doctor.findings import Verdict
from cluster.commands.doctor.kv_figures import kv_figures
from cluster.commands.doctor.memory_budget import describe_kv, figures_of
from tests.checkpoints import RECURRENT_FAMILIES
from tests.models.geometries import GEOMETRIES

BLOCK_SIZE = 16


def test_a_token_of_deepseek_v3_takes_1152_bytes_a_layer_in_bf16() -> None:
    figures = kv_figures(GEOMETRIES["DeepSeek-V3"], dtype_bytes=2, block_size=BLOCK_SIZE)

    [layers] = figures.layers.items()
    assert layers[1] == 61
    assert figures.bytes_per_token == 61 * 1152
    assert figures.state_bytes == 0


def test_every_rank_holds_all_latents_and_gets_them_in_a_handoff() -> None:
    figures = kv_figures(GEOMETRIES["DeepSeek-V3"], dtype_bytes=2, block_size=BLOCK_SIZE)

    assert figures.rank_bytes_per_token(8) == figures.bytes_per_token
    assert figures.transfer_bytes_per_token(8) == 8 * figures.bytes_per_token


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "state_bytes"),
    [
        # 24 layers, 8 KV heads of 64 numbers, keys and values, 2 bytes.
        ("gpt-oss-20b", 24 * 8 * 64 * 2 * 2, 0),
        ("Llama-3.3-70B", 80 * 8 * 128 * 2 * 2, 0),
        # 50 layers with a window, and 10 without, which have other heads.
        ("Gemma 4 31B", (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2, 0),
        # 12 layers attend. The others keep 4 inputs of a convolution of 8192 channels, and 32 matrices in float32.
        ("Qwen3-Next-80B", 12 * 2 * 256 * 2 * 2, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)),
    ],
)
def test_figures_follow_from_published_configs(name: str, bytes_per_token: int, state_bytes: int) -> None:
    figures = kv_figures(GEOMETRIES[name], dtype_bytes=2, block_size=BLOCK_SIZE)

    assert (figures.bytes_per_token, figures.state_bytes) == (bytes_per_token, state_bytes)
    assert figures.blocks_per_gib() == 2**30 // (BLOCK_SIZE * bytes_per_token)


def test_layers_that_read_the_kv_of_others_store_none() -> None:
    shared = GEOMETRIES["Gemma 4 31B"] | {"num_kv_shared_layers": 6}

    figures = kv_figures(shared, dtype_bytes=2, block_size=BLOCK_SIZE)

    assert sum(figures.layers.values()) == 54


@pytest.mark.more
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_the_state_of_a_request_is_that_of_the_engines_layout(family: str, checkpoint: Callable[[str], Path]) -> None:
    read, findings = read_checkpoint(checkpoint(family))
    assert read is not None, findings

    loaded = load_model(ModelConfig(model=str(checkpoint(family)), dtype="float32", device="cpu"))
    geometry = loaded.geometry
    assert geometry.state is not None
    figures = kv_figures(read.text_config, dtype_bytes=4, block_size=8)
    assert figures.state_bytes == geometry.state.size_bytes
    layout = make_layout(geometry, num_blocks=1, block_size=8, dtype=torch.float32, model_fingerprint="")
    assert figures.bytes_per_token * 8 == layout.block_size_bytes
    assert figures.num_state_blocks() == layout.num_state_blocks


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4", "mimo", "deepseek_v3", "longcat_flash"])
def test_figures_are_those_of_the_engines_layout(family: str, checkpoint: Callable[[str], Path]) -> None:
    model = ModelConfig(model=str(checkpoint(family)), dtype="float32", device="cpu")
    engine = EngineConfig(model=model, cache=CacheConfig(block_size=8, num_blocks=4))
    read, findings = read_checkpoint(checkpoint(family))
    assert read is not None, findings

    loaded = LoadedRunner.load(engine.model, engine.cache, engine.scheduler, engine.parallel)

    assert figures_of(read, engine).bytes_per_token * 8 == loaded.initialize(4).layout.block_size_bytes


def test_the_doctor_says_what_a_token_a_request_and_a_handoff_take() -> None:
    engine = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(block_size=BLOCK_SIZE))
    found = {name: describe_kv(Checkpoint(Path("m"), text, ()), engine) for name, text in GEOMETRIES.items()}

    assert found["DeepSeek-V3"].found == (
        "70272 bytes a token in bfloat16; 954 blocks of 16 tokens fit into a GiB; a handoff moves 70272 bytes a token"
    )
    assert "77856768 bytes of recurrent state a request; " in found["Qwen3-Next-80B"].found
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}


def test_heads_that_cannot_be_shared_are_a_failure() -> None:
    engine = EngineConfig.model_validate({"model": {"model": "m"}, "parallel": {"tensor_parallel_size": 3}})

    finding = describe_kv(Checkpoint(Path("m"), GEOMETRIES["Llama-3.3-70B"], ()), engine)

    assert finding.verdict is Verdict.FAILURE
    assert "8 KV heads cannot be shared by 3 ranks" in finding.found
