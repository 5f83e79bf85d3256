"""Many arrivals in virtual time: choices follow what changes, and do not swing from one engine to another.

The rates are 60 to 85 % of what the engines can do. Shares are those of decodes, in windows of 5 s.
"""

from __future__ import annotations

import pytest

from actors.core.outputs.scheduler_stats import LoadReport
from actors.costs.step_cost_model import StepCostModel
from tests.cluster.routing.cost_setup import cost_model
from tests.cluster.routing.virtual_engines import World, largest_change

PAIRS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ALIKE = ("both-0", "both-1", "both-2", "both-3")
WINDOW_S = 5.0


def mean_latency_s(world: World) -> float:
    return sum(world.latencies_s) / len(world.latencies_s)


def run(names: tuple[str, ...], rate_per_s: float, *, num_ingresses: int = 1, late_s: float = 0.25) -> World:
    world = World(names, num_ingresses=num_ingresses, late_s=late_s)
    world.offer(rate_per_s, 45.0)
    return world


@pytest.mark.parametrize("num_ingresses", [1, 3])
@pytest.mark.parametrize("names", [PAIRS, ALIKE], ids=["two pairs", "four engines that do both"])
def test_reports_that_are_five_seconds_late_cost_little_and_nothing_swings(
    names: tuple[str, ...], num_ingresses: int
) -> None:
    fresh = run(names, 30.0)
    late = run(names, 30.0, num_ingresses=num_ingresses, late_s=5.0)
    assert mean_latency_s(late) < 2 * mean_latency_s(fresh)
    assert len(late.latencies_s) > 0.95 * len(late.sent)
    windows = late.shares(WINDOW_S)[2:9]
    assert largest_change(windows) < 0.25
    busiest = max(max(window.values()) / sum(window.values()) for window in windows)
    assert busiest < 0.7, "half of the engines decode, and none of them does nearly all of it"


@pytest.mark.parametrize("names", [PAIRS, ALIKE], ids=["two pairs", "four engines that do both"])
def test_three_ingresses_are_as_good_as_one(names: tuple[str, ...]) -> None:
    one, three = run(names, 30.0), run(names, 30.0, num_ingresses=3)
    assert mean_latency_s(three) < 1.2 * mean_latency_s(one)
    # Engines that are alike have found out by then which of them decode.
    assert largest_change(three.shares(WINDOW_S)[4:9]) < 0.15


def test_a_new_ingress_that_knows_nothing_disturbs_nobody() -> None:
    world = run(PAIRS, 24.0, num_ingresses=2)
    before_s, num_before, num_sent = mean_latency_s(world), len(world.latencies_s), len(world.sent)
    world.add_ingress()
    world.offer(24.0, 10.0)
    after_s = sum(world.latencies_s[num_before:]) / (len(world.latencies_s) - num_before)
    assert after_s < 1.3 * before_s
    own, others = list[str](), list[str]()
    for one in world.sent[num_sent:]:
        (own if one.ingress == 2 else others).append(one.decode_id)
    assert len(own) > 40
    for engine_id in PAIRS:
        assert own.count(engine_id) / len(own) == pytest.approx(others.count(engine_id) / len(others), abs=0.3)


def test_an_engine_that_gets_slower_gets_fewer_requests_until_it_is_as_fast_as_before() -> None:
    world = World(PAIRS, late_s=0.25)
    shares = []
    for slowness in (1.0, 3.0, 1.0):
        world.set_model("decode-0", cost_model(slowness))
        num_before = len(world.sent)
        world.offer(20.0, 20.0)
        settled = world.sent[num_before + 100 :]
        shares.append(sum(one.decode_id == "decode-0" for one in settled) / len(settled))
    assert 0.35 < shares[0] < 0.65
    assert shares[1] < 0.5 * shares[0]
    assert 0.35 < shares[2] < 0.85, "a larger batch is cheaper, so one of both may do most of it"


@pytest.mark.parametrize("names", [PAIRS, ALIKE], ids=["two pairs", "four engines that do both"])
def test_requests_are_served_as_fast_while_no_report_comes_any_more(names: tuple[str, ...]) -> None:
    world = World(names, late_s=0.25)
    world.offer(24.0, 15.0)
    before_s, num_before, num_sent = mean_latency_s(world), len(world.latencies_s), len(world.sent)
    world.silence()
    world.offer(24.0, 20.0)
    after_s = sum(world.latencies_s[num_before:]) / (len(world.latencies_s) - num_before)
    assert after_s < 1.3 * before_s
    for engine_id in names:
        assert sum(engine_id in one.engine_ids for one in world.sent[num_sent:]) > 0.1 * (len(world.sent) - num_sent)


def test_virtual_engines_report_what_they_have() -> None:
    """A test of the test: without it, engines that never work would swing as little."""
    world = World(PAIRS)
    assert isinstance(world.engines[0].model, StepCostModel)
    world.offer(20.0, 2.0)
    reports = [one.report() for one in world.engines]
    assert all(isinstance(report, LoadReport) for report in reports)
    assert sum(report.num_decodes + report.num_coming_decodes for report in reports) > 0
    assert len(world.latencies_s) + 60 > len(world.sent) > 20
