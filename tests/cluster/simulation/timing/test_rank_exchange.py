"""Tests the estimate of what ranks exchange."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.costs.step_shape import StepShape
from cluster.simulation.timing.model_shape import ModelShape, read_model_shape
from cluster.simulation.timing.op_files import OpPoints
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.timing.rank_exchange import (
    COLLECTIVE_S,
    LINK_PART,
    RankExchange,
    RankLayout,
    estimate_hidden_size,
)
from tests.cluster.simulation.timing.op_directories import SHAPE, write_ops

_DATA = Path(__file__).parents[3] / "data" / "llmservingsim"
_TOKEN_S = 2 * 1000 / (1e9 * LINK_PART)
"""The seconds of moving one token's hidden state of 1000 numbers of two bytes."""


def _seconds(layout: RankLayout, *, has_experts: bool) -> float:
    exchange = RankExchange(layout, 3, 1000.0, has_experts=has_experts, link_bytes_per_s=1e9)
    return exchange.seconds(10, 40)


def test_one_rank_exchanges_nothing() -> None:
    assert _seconds(RankLayout(), has_experts=False) == 0.0
    assert _seconds(RankLayout(), has_experts=True) == 0.0
    assert _seconds(RankLayout(data_parallel_size=2), has_experts=False) == 0.0, "its engines are independent"


def test_tensor_parallel_ranks_sum_their_parts_twice_a_layer() -> None:
    layer_s = 2 * (COLLECTIVE_S + 2 * (3 / 4) * 10 * _TOKEN_S)
    assert _seconds(RankLayout(tensor_parallel_size=4), has_experts=False) == pytest.approx(3 * layer_s)


def test_engines_with_common_experts_gather_and_scatter_the_tokens_of_all() -> None:
    layer_s = 2 * (COLLECTIVE_S + 1 / 2 * 40 * _TOKEN_S)
    layout = RankLayout(data_parallel_size=2, is_expert_parallel=True)
    assert _seconds(layout, has_experts=True) == pytest.approx(3 * layer_s)


def test_both_kinds_of_ranks_sum_after_attention_and_gather_for_the_experts() -> None:
    layer_s = COLLECTIVE_S + 2 * (1 / 2) * 10 * _TOKEN_S + 2 * (COLLECTIVE_S + 3 / 4 * 40 * _TOKEN_S)
    assert _seconds(RankLayout(2, 2, is_expert_parallel=True), has_experts=True) == pytest.approx(3 * layer_s)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_the_size_of_the_hidden_states_follows_from_the_time_of_reading_weights(tensor_parallel_size: int) -> None:
    shape = ModelShape(num_layers=1, num_kv_heads=8, head_dim=128, num_kv_tokens=1)
    bytes_per_us, hidden_size = 1.5e6, 5120
    kv_bytes = 2 * 2 * 8 * 128 / tensor_parallel_size
    tokens = np.array([[1.0], [16.0], [2048.0]])
    o_us = np.array([10.0, 11.0, 500.0])
    qkv_us = o_us + hidden_size * kv_bytes / bytes_per_us + np.array([0.0, 0.0, 300.0])
    contexts = np.array([[0, 0, 128, 4096], [0, 0, 1, 16], [512, 0, 128, 4096]], dtype=np.float64)
    attention_us = np.array([128 * 4096 * kv_bytes / bytes_per_us, 9.0, 9999.0])
    found = estimate_hidden_size(
        OpPoints(tokens, qkv_us), OpPoints(tokens, o_us), OpPoints(contexts, attention_us), shape, tensor_parallel_size
    )
    assert found == pytest.approx(hidden_size)


def test_without_long_contexts_there_is_no_estimate() -> None:
    points = OpPoints(np.array([[1.0]]), np.array([1.0]))
    contexts = OpPoints(np.array([[0.0, 0.0, 1.0, 16.0]]), np.array([9.0]))
    assert estimate_hidden_size(points, points, contexts, SHAPE, 1) is None


@pytest.mark.parametrize("gpu", ["RTX4090", "RTXPRO6000"])
def test_the_estimate_for_a_known_model_is_near_its_size(gpu: str) -> None:
    shape = read_model_shape(_DATA / "runs" / gpu / "shape.json")
    tables = read_op_tables(_DATA / "ops" / gpu / "tp1", shape, RankLayout(data_parallel_size=2), 64e9)
    assert tables.exchange is not None
    assert tables.exchange.hidden_size == pytest.approx(4096, rel=0.2)


def test_a_step_of_several_ranks_is_longer_by_what_they_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ops(tmp_path)
    layout, step = RankLayout(tensor_parallel_size=2), StepShape(4, 4, 400)
    without = read_op_tables(tmp_path, SHAPE, layout)
    monkeypatch.setattr("cluster.simulation.timing.op_tables.estimate_hidden_size", lambda *_: 1000.0)
    with_exchange = read_op_tables(tmp_path, SHAPE, layout, 1e9)
    expected_s = RankExchange(layout, SHAPE.num_layers, 1000.0, has_experts=False, link_bytes_per_s=1e9).seconds(4, 4)
    assert without.exchange is None
    assert with_exchange.step_s(step) - without.step_s(step) == pytest.approx(expected_s)
