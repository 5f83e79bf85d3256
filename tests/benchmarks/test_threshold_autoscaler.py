"""Ray Serve's rule waits before it scales, and scales by the mean of what is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.threshold_autoscaler import ThresholdAutoscaler, ThresholdRule
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.simulator import simulate
from tests.cluster.simulation.simulated_cluster import make_cluster, make_workload


def decisions(rule: ThresholdRule, present: int, num_ongoing: int, first_s: int, last_s: int) -> list[int]:
    """Return what the rule wants in each second."""
    return [rule.decide(present, num_ongoing, float(now_s)) for now_s in range(first_s, last_s)]


def test_more_replicas_are_wanted_after_thirty_seconds_and_fewer_after_ten_minutes() -> None:
    rule = ThresholdRule(target=2.0)

    assert decisions(rule, 1, 7, 0, 31) == [1] * 30 + [4]
    assert decisions(rule, 4, 7, 31, 400) == [4] * 369
    # The mean falls within the look-back period; then the delay begins.
    wanted = decisions(rule, 4, 1, 400, 1100)
    first = wanted.index(1)
    assert 600 <= first <= 630
    assert wanted[:first] == [4] * first


def test_a_short_peak_scales_nothing() -> None:
    rule = ThresholdRule(target=2.0)

    assert decisions(rule, 2, 4, 0, 100) == [2] * 100
    assert decisions(rule, 2, 6, 100, 110) == [2] * 10
    assert decisions(rule, 2, 3, 110, 300) == [2] * 190


@pytest.mark.more
def test_a_simulated_fleet_grows_with_what_waits() -> None:
    spec = replace(make_cluster(["both"]), start_s=3.0)

    result = simulate(spec, make_workload(600, 8.0), seed=1, control=ThresholdAutoscaler({EngineRole.BOTH: 4.0}))

    assert max(point.serving.both for point in result.fleet) > 2
    assert result.fleet[0].serving.both == 1
