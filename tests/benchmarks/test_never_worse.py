"""Tests what the comparison of routing modes decides without a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks import never_worse
from benchmarks.never_worse import (
    ARMS,
    Calibration,
    Clusters,
    Kept,
    Result,
    all_cells,
    chosen_cells,
    geometric_mean,
    judge,
    table_of,
)
from benchmarks.server_runs import Server
from cluster.config import ClusterConfig


def test_every_shape_comes_with_both_kinds_of_prompts_at_a_rate_as_a_burst_and_throttled() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 24
    assert all(sum(cell.lengths) + cell.prefix_len <= 2048 for cell in cells), "what the demo model can take"
    assert {cell.prompts for cell in cells if cell.is_throttled} == {cell.prompts for cell in cells}


def test_a_part_of_the_cells_can_be_chosen_by_parts_of_their_names() -> None:
    assert chosen_cells([""]) == all_cells()
    names = [cell.name for cell in chosen_cells(["64x128 random burst", "1800x32 random"])]
    assert names == [
        "1800x32 random rate",
        "64x128 random burst",
        "1800x32 random burst",
        "1800x32 random rate throttled",
    ]
    with pytest.raises(typer.BadParameter, match="no cell has '1800x64' in its name"):
        chosen_cells(["1800x32", "1800x64"])


@pytest.mark.parametrize("arm", ARMS)
def test_the_settings_of_each_cluster_are_valid(arm: str, tmp_path: Path) -> None:
    load = Calibration("64x128 random", 1.0, 0.5, 0.05)
    command = Clusters(tmp_path, None, 100.0).command(arm, load, 8000)
    config = ClusterConfig.model_validate(yaml.safe_load(Path(command[-1]).read_text()))
    assert config.routing.mode == arm
    assert config.slo.itl_ms == pytest.approx(50.0)
    assert config.kv_transfer.max_send_mib_per_s == 100.0
    assert config.num_cpus == 2


def test_arms_get_the_same_prompts_and_no_cluster_gets_any_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else calibrations and later cells would be served from the prefix cache."""
    starts: list[str] = []
    runs: list[tuple[str, int]] = []

    @contextmanager
    def serving(command_of: Callable[[int], Sequence[str]]) -> Iterator[Server]:
        starts.append(Path(command_of(8000)[-1]).stem)
        yield Server(f"{starts[-1]} {len(starts)}", 1.0)

    def bench(url: str, seed: int, num_requests: int, *lengths_and_options: object) -> dict[str, Any]:
        runs.append((url, seed))
        figures = {"percentiles": {"50": {"value": 0.1}, "99": {"value": 0.1}}}
        goodput = {"per_s": 1.0, "share": float(len(runs) % 3 > 0)}
        return {"goodput": goodput, "output_throughput": 9.0, "metrics": {"ttft": figures, "itl": figures}}

    monkeypatch.setattr(never_worse, "serving", serving)
    monkeypatch.setattr(never_worse, "bench", bench)
    never_worse.run(tmp_path / "results.jsonl", repeats=2, only=["1800x"], requests=4)

    assert len(set(runs)) == len(runs) > 3 * 2 * 12
    seeds = {arm: {seed for url, seed in runs if url.startswith(arm)} for arm in ARMS}
    repeats = [cell.seed(number) for cell in chosen_cells(["1800x"]) for number in range(2)]
    assert all(seeds[arm].issuperset(repeats) for arm in ARMS)


@pytest.mark.parametrize(
    ("name", "rate", "num_requests"),
    [("64x128 random rate", 47.0, 376), ("64x128 random rate", 1.5, 32), ("64x128 random burst", 47.0, 32)],
)
def test_a_high_rate_lasts_for_seconds(
    name: str, rate: float, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(never_worse, "bench", lambda url, seed, num, *options: sent.append(num))
    [cell] = [one for one in all_cells() if one.name == name]
    never_worse._offer(cell, "", Calibration(cell.prompts, rate, 0.1, 0.02), number=0, num_requests=32)
    assert sent == [num_requests]


def results_of(cell: str, figures: dict[str, float], itl_s: dict[str, float]) -> list[Result]:
    return [Result(cell, repeat, arm, figures[arm], itl_s[arm]) for repeat in range(5) for arm in ARMS]


def cells_of(results: list[Result]) -> list[list[str]]:
    table = table_of(results)
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_a_cell_is_met_if_cost_reaches_the_better_arm_and_long_prompts_disturb_less() -> None:
    itl_s = {"cost": 0.06, "disaggregate": 0.05, "aggregate": 0.1}
    good = results_of("1800x32 random rate", {"cost": 2.0, "disaggregate": 1.0, "aggregate": 2.0}, itl_s)
    slow = results_of("64x128 random rate", {"cost": 0.9, "disaggregate": 1.0, "aggregate": 0.5}, itl_s)
    disturbed = results_of("1800x32 shared rate", dict.fromkeys(ARMS, 1.0), itl_s | {"cost": 0.08})
    rows = cells_of([*good, *slow, *disturbed])
    assert [row[-1] for row in rows] == ["yes", "no", "no", "no"]
    assert rows[0][4] == "1.00 (1.00 to 1.00)"
    assert rows[-1][0] == "geometric mean of rates"
    assert rows[-1][4] == f"{0.9 ** (1 / 3):.2f}"


def test_an_unfinished_cell_has_no_verdict() -> None:
    results = [Result("64x128 random rate", 0, "cost", 1.0, 0.1)]
    assert cells_of(results) == [["64x128 random rate", "1 runs", "0 runs", "0 runs", "", "", ""]]


def test_the_better_arm_is_the_one_with_the_higher_median() -> None:
    figures = {"cost": [1.0] * 5, "disaggregate": [1.0, 1.0, 2.0, 2.0, 2.0], "aggregate": [1.5] * 5}
    assert judge(figures, {arm: [0.1] * 5 for arm in ARMS}).ratio == 0.5


def test_the_mean_of_ratios() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.0, 2.0]) == 0.0
    assert math.isnan(geometric_mean([math.nan, 2.0]))


def test_results_are_continued(tmp_path: Path) -> None:
    path, cell = tmp_path / "results.jsonl", all_cells()[0]
    kept = Kept(path)
    result, load = Result(cell.name, 0, "cost", 1.0, 0.1), Calibration(cell.prompts, 1.0, 0.5, 0.05)
    kept.add(result)
    kept.add(load)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(result), asdict(load)]
    again = Kept(path)
    assert again.results == [result]
    assert again.calibrations == {cell.prompts: load}
    assert again.has(cell, 0, "cost")
    assert again.lacks(cell, 1)
