"""Tests the prediction of attention between and beyond measured points."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import InvalidConfig
from cluster.simulation.timing.attention_grid import AttentionGrid
from cluster.simulation.timing.op_files import OpPoints

_CHUNKS = (0, 16, 64, 256)
_BEFORE = (0, 16, 64, 256)
_DECODES = (0, 1, 4, 16)
_CONTEXTS = (0, 16, 64, 256)


def _exact(chunk: float, before: float, num_decodes: float, context: float) -> float:
    """Attention that is linear in each key."""
    decodes_us = 2.0 * num_decodes + 0.01 * num_decodes * context
    return decodes_us + (5.0 + 0.1 * chunk + 0.001 * chunk * before if chunk else 0.0)


def _grid(is_measured: Callable[[float, float, float, float], bool] = lambda *_: True) -> AttentionGrid:
    keys = [
        key
        for key in itertools.product(_CHUNKS, _BEFORE, _DECODES, _CONTEXTS)
        if (key[0] or not key[1]) and bool(key[2]) == bool(key[3]) and (key[0] or key[2]) and is_measured(*key)
    ]
    points = OpPoints(np.array(keys, dtype=np.float64), np.array([_exact(*key) for key in keys]))
    return AttentionGrid(Path("attention.csv"), points)


@pytest.mark.parametrize(
    "key", [(64, 16, 4, 64), (100, 30, 9, 200), (0, 0, 3, 40), (200, 0, 0, 0), (16, 256, 1, 16), (32, 8, 2, 16)]
)
def test_a_prediction_between_points_is_linear_in_each_key(key: tuple[float, float, float, float]) -> None:
    grid = _grid()
    assert grid.step_us(*key) == pytest.approx(_exact(*key))
    assert grid.num_extrapolated == 0


def test_points_that_are_missing_between_others_are_interpolated() -> None:
    fine = _grid(lambda chunk, before, num_decodes, context: (chunk, context) != (64, 64) and num_decodes != 4)
    assert fine.step_us(64, 16, 4, 64) == pytest.approx(_exact(64, 16, 4, 64))
    assert fine.num_extrapolated == 0


def test_what_had_no_room_in_memory_is_extrapolated_and_counted() -> None:
    grid = _grid(lambda chunk, before, num_decodes, context: num_decodes * context <= 1024)
    assert grid.step_us(0, 0, 4, 256) == pytest.approx(_exact(0, 0, 4, 256))
    assert grid.num_extrapolated == 0
    assert grid.step_us(0, 0, 16, 256) == pytest.approx(_exact(0, 0, 16, 256))
    assert grid.decodes_us(16, np.array([64.0, 256.0])) == pytest.approx([_exact(0, 0, 16, 64), _exact(0, 0, 16, 256)])
    assert grid.num_extrapolated == 2


@pytest.mark.parametrize("key", [(512, 0, 0, 0), (256, 999, 0, 0), (0, 0, 32, 16), (0, 0, 1, 5000)])
def test_predictions_beyond_the_last_point_go_on_as_before_and_are_counted(
    key: tuple[float, float, float, float],
) -> None:
    grid = _grid()
    assert grid.step_us(*key) == pytest.approx(_exact(*key))
    assert grid.num_extrapolated == 1


def test_less_than_the_least_that_was_measured_takes_as_long_as_that() -> None:
    grid = _grid()
    assert grid.step_us(3, 0, 0, 0) == pytest.approx(_exact(16, 0, 0, 0))
    assert grid.step_us(0, 0, 4, 2) == pytest.approx(_exact(0, 0, 4, 16))
    assert grid.decodes_us(4, np.array([2.0])) == pytest.approx([_exact(0, 0, 4, 16)])


def test_many_decode_steps_have_the_times_of_single_ones() -> None:
    grid = _grid()
    contexts = np.arange(10.0, 400.0, 7.0)
    one_by_one = [grid.decodes_us(5, contexts[index : index + 1])[0] for index in range(len(contexts))]
    assert grid.decodes_us(5, contexts).tolist() == one_by_one
    assert one_by_one == pytest.approx([grid.step_us(0, 0, 5, context) for context in contexts])


def test_a_table_without_pure_decodes_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"attention\.csv: column prefill_chunk needs 0 and at least two other"):
        _grid(lambda chunk, before, num_decodes, context: chunk > 0)


def test_a_table_with_too_few_points_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="too few points to predict prompts"):
        _grid(lambda chunk, before, num_decodes, context: not chunk or (not num_decodes and before == chunk))
