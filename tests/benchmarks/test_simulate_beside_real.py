"""Tests what the comparison of simulated and real clusters decides without a cluster."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import FEATURES
from benchmarks.simulate_beside_real import (
    CLUSTERS,
    LIMITS,
    Load,
    Result,
    RunSize,
    Times,
    command_of,
    figures,
    judge,
    predict,
    spec_of,
    table_of,
    times_of,
    with_longer_steps,
)
from cluster.config import ClusterConfig

_MODEL = StepCostModel(tuple({"step": 0.002, "token": 1e-5, "decode": 1e-4}.get(name, 0.0) for name in FEATURES))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_settings_of_each_cluster_are_valid_and_those_of_the_simulator(cluster: str, tmp_path: Path) -> None:
    command = command_of(tmp_path, cluster, 50_000, 8000)
    config = ClusterConfig.model_validate(yaml.safe_load(Path(command[-1]).read_text()))
    counts = {role: getattr(config, role).count for role in ("prefill", "decode", "both")}
    assert {role: count for role, count in counts.items() if count} == CLUSTERS[cluster]
    spec = spec_of(cluster, {f"{role}-0": _MODEL for role in CLUSTERS[cluster]})
    assert [engine.role.value for engine in spec.engines] == [
        role for role, count in CLUSTERS[cluster].items() for _ in range(count)
    ]
    assert spec.routing_mode == config.routing.mode
    assert all(engine.scheduler == config.scheduler for engine in spec.engines)
    assert all(engine.num_blocks == config.cache.num_blocks for engine in spec.engines)


def test_a_run_has_as_many_requests_as_come_in_its_seconds() -> None:
    size = RunSize(150, 12.0)
    assert [size.num_requests(rate) for rate in (0.1, 5.0, 100.0)] == [24, 60, 150]


def test_the_times_of_a_run_are_in_the_order_in_which_it_was_sent() -> None:
    asked = {"error": None, "input_tokens": 10, "output_tokens": 4}
    later = {**asked, "sent": 2.5, "ttft": 0.2, "itl": [0.1, 0.3, 0.2], "tpot": 0.2}
    found = {"requests": [later, {**asked, "sent": 2.0, "ttft": 0.1, "itl": [], "tpot": None}]}
    first, second = times_of(found)
    assert first == Times(0.0, 0.1, 0.0, 0.0, 0.0, 10, 4)
    assert (second.sent_s, second.gap_p50_s, second.tpot_s) == (0.5, 0.2, 0.2)
    with pytest.raises(ValueError, match="a request failed"):
        times_of({"requests": [{**later, "error": "HTTP 503"}]})


def test_goodput_counts_requests_that_met_both_aims_with_the_delay_of_clients() -> None:
    times = [
        Times(0.0, 0.10, 0.01, 0.07, 0.02, 10, 5),
        Times(1.0, 0.19, 0.01, 0.02, 0.02, 10, 5),
        Times(2.0, 0.10, 0.01, 0.02, 0.09, 10, 5),
    ]
    load = Load(rate=1.0, ttft_aim_s=0.2, tpot_aim_s=0.05)
    assert figures(times, load)["goodput"] == pytest.approx(2 / 2.0)
    late = figures(times, load, delay_s=0.05)
    assert late["goodput"] == pytest.approx(1 / 2.0)
    assert late["TTFT p50"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("real", "predicted", "error", "spread", "beyond"),
    [
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], 0.1, 0.0, 0.1),
        ([0.9, 1.0, 1.2], [1.2, 1.2, 1.2], 0.2, 0.3, 0.0),
        ([0.9, 1.0, 1.2], [0.8, 0.8, 0.8], -0.2, 0.3, 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0.0),
        ([0.0, 0.0], [0.5, 0.5], math.inf, 0.0, math.inf),
    ],
)
def test_a_prediction_is_judged_by_how_far_it_is_outside_of_the_real_repeats(
    real: list[float], predicted: list[float], error: float, spread: float, beyond: float
) -> None:
    found = judge(real, predicted)
    assert [found.error, found.spread, found.beyond] == pytest.approx([error, spread, beyond])


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_prediction_has_the_times_of_every_request(cluster: str) -> None:
    real = [Times(0.05 * index, 0.0, 0.0, 0.0, 0.0, 100, 20) for index in range(10)]
    predicted = predict(cluster, {f"{role}-0": _MODEL for role in CLUSTERS[cluster]}, real)
    assert [one.sent_s for one in predicted] == pytest.approx([one.sent_s for one in real])
    assert all(one.num_output_tokens == 20 for one in predicted)
    # A step of one request takes 2.1 ms, and its prompt 3 ms.
    assert all(0.003 <= one.ttft_s < 0.02 for one in predicted)
    assert all(one.gap_p50_s == pytest.approx(0.0021, rel=0.1) for one in predicted)


def test_the_time_between_steps_makes_every_gap_longer() -> None:
    real = [Times(0.0, 0.0, 0.0, 0.0, 0.0, 100, 20)]
    [plain] = predict("1 both", {"both-0": _MODEL}, real)
    [longer] = predict("1 both", {"both-0": with_longer_steps(_MODEL, 0.001)}, real)
    assert longer.gap_p50_s - plain.gap_p50_s == pytest.approx(0.001)
    assert longer.ttft_s - plain.ttft_s == pytest.approx(0.001)


def test_the_table_says_which_predictions_are_met() -> None:
    real = dict.fromkeys(LIMITS, 1.0)
    results = [Result("1 both", "64x128", index, real, {**real, "TTFT p50": 1.2, "TTFT p99": 1.15}) for index in (0, 1)]
    table = table_of(results)
    met = dict(zip(table.columns[2].cells, table.columns[-1].cells, strict=True))
    assert met == {"TTFT p50": "no", "ITL p50": "yes", "goodput": "yes", "TTFT p99": "yes", "ITL p99": "yes"}
