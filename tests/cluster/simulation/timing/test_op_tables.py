"""Tests the durations of steps that tables of measured operators give."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from actors.costs.step_shape import StepShape
from cluster.errors import InvalidConfig
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.timing.rank_exchange import RankLayout
from tests.cluster.simulation.timing.op_directories import (
    NUM_LAYERS,
    SHAPE,
    attention_us,
    dense_us,
    expected_us,
    write_ops,
)

_DECODES = StepShape(num_tokens=4, num_decodes=4, num_decode_context=4 * 100)
_MIXED = StepShape(104, 4, 4 * 100, num_prefills=1, num_prefill_context=50, num_prefill_pairs=100 * (50 + 50))


def test_a_step_is_layers_times_their_operators_and_what_runs_once(tmp_path: Path) -> None:
    tables = read_op_tables(write_ops(tmp_path), SHAPE)
    assert tables.step_s(_DECODES) * 1e6 == pytest.approx(expected_us(_DECODES))
    assert tables.step_s(_MIXED) * 1e6 == pytest.approx(expected_us(_MIXED, 100, 50))
    prompt = StepShape(200, num_prefills=1, num_prefill_pairs=200 * 100)
    assert tables.step_s(prompt) * 1e6 == pytest.approx(expected_us(prompt, 200, 0))
    assert tables.num_extrapolated == 0


def test_a_run_of_decode_steps_has_exactly_the_times_of_its_steps(tmp_path: Path) -> None:
    tables = read_op_tables(write_ops(tmp_path), SHAPE).slower_by(1.07)
    shape = StepShape(3, 3, 3 * 17)
    steps = [StepShape(3, 3, 3 * 17 + 3 * index) for index in range(300)]
    assert tables.decode_run_s(shape, 300).tolist() == [tables.step_s(step) for step in steps]


def test_several_short_prompts_take_less_than_one_long_one_and_no_less_than_each_of_them(tmp_path: Path) -> None:
    tables = read_op_tables(write_ops(tmp_path), SHAPE)
    one = tables.step_s(StepShape(400, num_prefills=4, num_prefill_pairs=400 * 200))
    four = tables.step_s(StepShape(400, num_prefills=4, num_prefill_pairs=4 * 100 * 50))
    least_us = dense_us(400, 4) + NUM_LAYERS * attention_us(100, 0, 0, 0)
    assert four * 1e6 == pytest.approx(least_us)  # The times of attention are linear in the chunk here.
    assert four < one


def test_every_step_is_slower_by_a_factor(tmp_path: Path) -> None:
    tables = read_op_tables(write_ops(tmp_path), SHAPE)
    slow = tables.slower_by(2.0).slower_by(1.5)
    assert slow.step_s(_MIXED) == pytest.approx(3 * tables.step_s(_MIXED))
    assert slow.step_s(_DECODES) == pytest.approx(3 * tables.step_s(_DECODES))


def test_steps_beyond_the_tables_are_predicted_and_counted(tmp_path: Path) -> None:
    tables = read_op_tables(write_ops(tmp_path), SHAPE)
    tables.step_s(StepShape(4, 4, 4 * 900))
    assert tables.num_extrapolated == 0
    far = StepShape(4, 4, 4 * 5000)
    assert tables.step_s(far) * 1e6 == pytest.approx(expected_us(far))
    assert tables.num_extrapolated == 1
    many = StepShape(100, 100, 100 * 100)
    assert tables.step_s(many) * 1e6 == pytest.approx(expected_us(many), rel=0.01)
    assert tables.num_extrapolated > 1


def test_experts_take_the_place_of_the_mlp_and_serve_all_data_parallel_engines(tmp_path: Path) -> None:
    directory = write_ops(tmp_path, with_experts=True)
    alone = read_op_tables(directory, SHAPE)
    fixed_us = dense_us(4, 4, with_experts=True) + NUM_LAYERS * attention_us(0, 0, 4, 100)
    activated = 8 * (1 - (7 / 8) ** 4)
    assert alone.step_s(_DECODES) * 1e6 == pytest.approx(fixed_us + NUM_LAYERS * 20 * activated, rel=0.01)
    two = read_op_tables(directory, SHAPE, RankLayout(data_parallel_size=2, is_expert_parallel=True))
    activated = 8 * (1 - (7 / 8) ** 8) / 2
    assert two.step_s(_DECODES) * 1e6 == pytest.approx(fixed_us + NUM_LAYERS * 20 * activated, rel=0.01)


def test_engines_in_lockstep_wait_for_the_slowest(tmp_path: Path) -> None:
    directory = write_ops(tmp_path, with_experts=True)
    tables = read_op_tables(directory, SHAPE, RankLayout(data_parallel_size=2, is_expert_parallel=True))
    together = tables.lockstep_s([_DECODES, _MIXED])
    assert together == tables.lockstep_s([_MIXED, _DECODES])
    assert tables.lockstep_s([_DECODES, _DECODES]) == pytest.approx(tables.step_s(_DECODES))
    assert tables.step_s(_DECODES) < together <= tables.step_s(_MIXED)


def test_experts_of_tensor_parallel_ranks_are_found_beside_their_directory(tmp_path: Path) -> None:
    write_ops(tmp_path / "tp1", with_experts=True)
    write_ops(tmp_path / "tp2", with_experts=True)
    (tmp_path / "tp2" / "moe.csv").unlink()
    layout = RankLayout(tensor_parallel_size=2)
    assert read_op_tables(tmp_path / "tp2", SHAPE, layout).experts is not None
    (tmp_path / "tp1" / "moe.csv").unlink()
    with pytest.raises(InvalidConfig, match=r"no operator down_proj, and .*tp2 has no moe\.csv either"):
        read_op_tables(tmp_path / "tp2", SHAPE, layout)


def test_an_unknown_operator_runs_once_a_layer_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_ops(tmp_path)
    known = read_op_tables(tmp_path, SHAPE)
    with (tmp_path / "dense.csv").open("a") as file:
        file.write("q_norm,1,3\nq_norm,1024,3\n")
    with caplog.at_level(logging.WARNING):
        more = read_op_tables(tmp_path, SHAPE)
    assert (more.step_s(_DECODES) - known.step_s(_DECODES)) * 1e6 == pytest.approx(3 * NUM_LAYERS)
    assert "unknown operators are taken to run once a layer: q_norm" in caplog.text


def test_a_directory_without_a_file_or_an_operator_is_refused(tmp_path: Path) -> None:
    write_ops(tmp_path)
    text = (tmp_path / "dense.csv").read_text()
    (tmp_path / "dense.csv").write_text(text.replace("qkv_proj", "other"))
    with pytest.raises(InvalidConfig, match=r"dense\.csv: there is no operator qkv_proj"):
        read_op_tables(tmp_path, SHAPE)
    (tmp_path / "per_sequence.csv").unlink()
    with pytest.raises(InvalidConfig, match=r"per_sequence\.csv: it cannot be read"):
        read_op_tables(tmp_path, SHAPE)
