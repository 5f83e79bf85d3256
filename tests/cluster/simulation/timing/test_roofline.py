"""Tests the guess of step times from a model's size and a GPU's data sheet.

Tests of cluster/simulation/timing/roofline.py, cluster/simulation/timing/model_size.py,
cluster/simulation/timing/gpu_data_sheets.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.costs.step_shape import StepShape
from cluster.errors import InvalidConfig
from cluster.simulation.timing.gpu_data_sheets import GPU_DATA_SHEETS, data_sheet_in, find_data_sheet
from cluster.simulation.timing.model_shape import read_model_shape
from cluster.simulation.timing.model_size import ModelSize, read_model_size
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.timing.roofline import WARNING, RooflineStepTimes, guess_step_times

_DATA = Path(__file__).parents[3] / "data" / "llmservingsim"
_LLAMA: Mapping[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_QWEN_MOE: Mapping[str, object] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
_DECODE = StepShape(16, 16, 16 * 1000)


def _size(tmp_path: Path, config: Mapping[str, object]) -> ModelSize:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_size(tmp_path)


def test_the_size_of_a_known_model_is_right(tmp_path: Path) -> None:
    size = _size(tmp_path, _LLAMA)
    assert size.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert size.kv_bytes_per_token == 131_072
    assert _size(tmp_path, {"text_config": dict(_LLAMA)}) == size
    assert _size(tmp_path, {**_LLAMA, "quantization_config": {"quant_method": "fp8"}}).bytes_per_weight == 1.0


def test_a_mixture_of_experts_has_all_weights_and_computes_with_few(tmp_path: Path) -> None:
    size = _size(tmp_path, _QWEN_MOE)
    assert size.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.01)
    active = size.num_layers * (size.layer_weights + size.num_chosen * size.expert_weights) + 2 * size.head_weights
    assert active == pytest.approx(3.3e9, rel=0.05)


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"hidden_size": None}, "hidden_size: None is no whole number of at least 1"),
        ({"vocab_size": "many"}, "vocab_size: 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"kv_lora_rank": 512}, "latent attention has no estimate"),
    ],
)
def test_a_config_that_says_no_size_is_refused(tmp_path: Path, change: dict[str, object], mistake: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        _size(tmp_path, {**_LLAMA, **change})
    assert mistake in str(refused.value)


@pytest.mark.parametrize(("gpu", "data_sheet"), [("RTX4090", "rtx4090"), ("RTXPRO6000", "RTX PRO 6000")])
def test_guesses_are_near_what_was_measured(tmp_path: Path, gpu: str, data_sheet: str) -> None:
    guess = RooflineStepTimes(_size(tmp_path, _LLAMA), find_data_sheet(data_sheet))
    measured = read_op_tables(_DATA / "ops" / gpu / "tp1", read_model_shape(_DATA / "runs" / gpu / "shape.json"))
    shapes = [
        StepShape(1, 1, 100),
        _DECODE,
        StepShape(128, 128, 128 * 1000),
        StepShape(512, num_prefills=1, num_prefill_pairs=512 * 256),
        StepShape(2048, num_prefills=1, num_prefill_context=8192, num_prefill_pairs=2048 * (8192 + 1024)),
    ]
    ratios = [guess.step_s(shape) / measured.step_s(shape) for shape in shapes]
    assert all(0.7 < ratio < 1.5 for ratio in ratios), ratios


def test_a_run_of_decode_steps_has_exactly_the_times_of_its_steps(tmp_path: Path) -> None:
    guess = RooflineStepTimes(_size(tmp_path, _LLAMA), GPU_DATA_SHEETS["h100"])
    steps = [StepShape(16, 16, 16 * 1000 + 16 * index) for index in range(50)]
    assert guess.decode_run_s(_DECODE, 50).tolist() == [guess.step_s(step) for step in steps]


def test_tensor_parallel_ranks_share_the_work_and_exchange_sums(tmp_path: Path) -> None:
    size = _size(tmp_path, _LLAMA)
    one, two = (RooflineStepTimes(size, GPU_DATA_SHEETS["h100"], ranks) for ranks in (1, 2))
    assert one.step_s(_DECODE) / 2 < two.step_s(_DECODE) < one.step_s(_DECODE)
    assert two.num_kv_tokens > 2 * one.num_kv_tokens


def test_the_cache_has_the_room_that_weights_leave(tmp_path: Path) -> None:
    size = _size(tmp_path, _LLAMA)
    assert RooflineStepTimes(size, GPU_DATA_SHEETS["rtxpro6000"]).num_kv_tokens == pytest.approx(521_000, rel=0.01)
    large = _size(tmp_path, {**_LLAMA, "num_hidden_layers": 400})
    with pytest.raises(InvalidConfig, match="1 of these GPUs have no room for 177 GB of weights"):
        _ = RooflineStepTimes(large, GPU_DATA_SHEETS["h100"]).num_kv_tokens


def test_a_guess_says_loudly_that_it_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        guess_step_times(_size(tmp_path, _LLAMA), GPU_DATA_SHEETS["l4"])
    assert WARNING in caplog.text
    assert WARNING.startswith("NOTHING WAS MEASURED")


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    assert find_data_sheet("H100") is GPU_DATA_SHEETS["h100"]
    with pytest.raises(InvalidConfig, match="'tpu' has no data sheet here; there are a100, h100, h200, b200"):
        find_data_sheet("tpu")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("ops/RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2", "rtxpro6000"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_gpu_is_found_in_the_names_that_drivers_and_directories_have(text: str, name: str | None) -> None:
    assert data_sheet_in(text) is (None if name is None else GPU_DATA_SHEETS[name])
