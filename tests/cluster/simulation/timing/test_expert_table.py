"""Tests the prediction of a layer's experts, on one rank and on several."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import InvalidConfig
from cluster.simulation.timing.expert_table import ExpertTable
from cluster.simulation.timing.op_files import OpPoints


def _points(num_experts: int = 16, num_chosen: int = 2, ranks: int = 1) -> list[tuple[tuple[float, ...], float]]:
    """Experts that take 10 us each, and 1 us a token."""
    activated = [num for num in (1, 2, 4, 8, 16) if num_chosen <= num <= num_experts]
    return [
        ((tokens, num, ranks), 10.0 * num + tokens)
        for tokens, num in itertools.product((1, 2, 4, 8, 64), activated)
        if num <= tokens * num_chosen
    ]


def _table(
    points: list[tuple[tuple[float, ...], float]], num_ranks: int = 1, *, is_expert_parallel: bool = False
) -> ExpertTable:
    keys, times_us = zip(*points, strict=True)
    op_points = OpPoints(np.array(keys, dtype=np.float64), np.array(times_us))
    return ExpertTable(Path("moe.csv"), op_points, num_ranks, is_expert_parallel=is_expert_parallel)


def _activated(num_tokens: int, num_experts: float = 16, num_chosen: float = 2) -> float:
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64])
def test_a_rank_with_all_experts_pays_for_those_that_its_tokens_activate(num_tokens: int) -> None:
    assert _table(_points()).layer_us(num_tokens) == pytest.approx(10 * _activated(num_tokens) + num_tokens)


def test_no_tokens_take_no_time_and_more_than_were_measured_take_longer() -> None:
    table = _table(_points())
    assert table.layer_us(0) == 0.0
    assert table.layer_us(640) == pytest.approx(10 * 16 + 640)


def test_ranks_that_share_the_experts_have_their_part_of_experts_and_of_pairs() -> None:
    table = _table(_points(), 2, is_expert_parallel=True)
    assert table.layer_us(64) == pytest.approx(10 * _activated(64) / 2 + 32)


def test_points_that_were_measured_on_so_many_ranks_are_preferred() -> None:
    both = [*_points(), *((key, 100 + us) for key, us in _points(num_experts=8, num_chosen=1, ranks=2))]
    of_rank = 100 + 10 * _activated(64, 8, 1) + 64
    assert _table(both, 2, is_expert_parallel=True).layer_us(64) == pytest.approx(of_rank)
    assert _table(both, 1).layer_us(64) == pytest.approx(10 * _activated(64) + 64)


def test_ranks_that_share_each_expert_divide_the_time() -> None:
    assert _table(_points(), 2).layer_us(64) == pytest.approx((10 * _activated(64) + 64) / 2)


def test_a_table_without_a_single_token_or_for_other_ranks_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"moe\.csv: it has no point with one token"):
        _table([point for point in _points() if point[0][0] > 1])
    with pytest.raises(InvalidConfig, match="neither for ep 2 nor for ep 1"):
        _table(_points(ranks=4), 2, is_expert_parallel=True)
