"""Queues whose times are known in closed form: the simulation has to have them."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable

import pytest

from actors.config import SchedulerConfig
from cluster.simulation.simulation_result import SimulationResult
from cluster.simulation.simulator import simulate
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.cluster.simulation.simulated_cluster import constant_steps, make_cluster

STEP_S = 0.001
NUM_SERVERS = 4
MEAN_TOKENS = 200
"""A request takes so many steps on average. The number is exponentially distributed, in whole steps."""
RHO = 0.7
NUM_REQUESTS = 4000


def mmk_workload(seed: int) -> list[WorkloadRequest]:
    draw, arrival_s, offered = random.Random(seed), 0.0, []
    for index in range(NUM_REQUESTS):
        arrival_s += draw.expovariate(RHO * NUM_SERVERS / (MEAN_TOKENS * STEP_S))
        num_tokens = max(1, math.ceil(draw.expovariate(1 / MEAN_TOKENS)))
        offered.append(WorkloadRequest(f"r{index}", arrival_s, 1, num_tokens))
    return offered


@pytest.fixture(scope="module")
def offered() -> list[WorkloadRequest]:
    return mmk_workload(5)


@pytest.fixture(scope="module")
def result(offered: list[WorkloadRequest]) -> SimulationResult:
    """An engine that decodes NUM_SERVERS requests at a time, each at its own speed: a queue with as many servers."""
    config = SchedulerConfig(max_num_seqs=NUM_SERVERS, max_num_batched_tokens=NUM_SERVERS)
    spec = make_cluster(["both"], num_blocks=100, scheduler=config, step_times=constant_steps(STEP_S))
    return simulate(spec, offered, seed=1)


def test_each_wait_is_that_of_a_queue_with_k_servers(offered: list[WorkloadRequest], result: SimulationResult) -> None:
    # The first token comes one step after the wait. A request that finds a free server waits for the step under way.
    waits_s = [found.ttft_s - STEP_S for found in result.requests]
    exact_s = _waits_of_queue([(one.arrival_s, one.num_output_tokens * STEP_S) for one in offered], NUM_SERVERS)

    differences_s = [wait_s - exact for wait_s, exact in zip(waits_s, exact_s, strict=True)]
    assert statistics.fmean(differences_s) == pytest.approx(STEP_S / 2, abs=STEP_S)
    assert max(map(abs, differences_s)) < 5 * STEP_S


def test_the_mean_wait_is_that_of_erlang_c(
    result: SimulationResult, record_property: Callable[[str, object], None]
) -> None:
    mean_s = statistics.fmean(found.ttft_s - 1.5 * STEP_S for found in result.requests)
    exact_s = _erlang_c_wait(NUM_SERVERS, RHO, MEAN_TOKENS * STEP_S)

    record_property("figure", f"simulator against M/M/{NUM_SERVERS}, mean wait: {mean_s / exact_s - 1:+.1%}")
    # 4 000 arrivals at 70 % load leave a tenth to chance.
    assert mean_s == pytest.approx(exact_s, rel=0.1)


def test_littles_law_holds_between_counts_and_times(
    offered: list[WorkloadRequest], result: SimulationResult, record_property: Callable[[str, object], None]
) -> None:
    # The engine counts requests in steps; the times are those of clients. In each step a request in service gets one
    # token, so the mean number in service is tokens by steps, and that is the arrival rate times the time in service.
    [engine] = result.engines
    in_service = engine.num_output_tokens / engine.num_steps * engine.busy_s / result.duration_s
    time_s = statistics.fmean(found.end_s - found.first_token_s + STEP_S for found in result.requests)

    by_law = len(offered) / result.duration_s * time_s
    record_property("figure", f"simulator against Little's law, requests in service: {in_service / by_law - 1:+.2%}")
    assert in_service == pytest.approx(by_law, rel=0.001)
    assert in_service == pytest.approx(RHO * NUM_SERVERS, rel=0.05)


def test_a_simulation_that_ends_early_has_the_requests_of_its_last_moment(
    offered: list[WorkloadRequest], result: SimulationResult
) -> None:
    config = SchedulerConfig(max_num_seqs=NUM_SERVERS, max_num_batched_tokens=NUM_SERVERS)
    spec = make_cluster(["both"], num_blocks=100, scheduler=config, step_times=constant_steps(STEP_S))
    for until_s in (3.3333, 11.1111):
        early = simulate(spec, offered, seed=1, until_s=until_s)

        unfinished = [found.request_id for found in early.requests if found.outcome != "complete"]
        expected = [
            found.request_id for found in result.requests if found.arrival_s <= until_s and found.end_s > until_s
        ]
        assert unfinished == expected
        assert expected
        for found in early.requests:
            if found.outcome == "unfinished" and found.first_token_s <= until_s:
                # The first token came with one step, and each further one with the next one.
                assert found.num_output_tokens == int((early.duration_s - found.first_token_s) / STEP_S + 1e-9) + 1
                assert found.itl_max_s == pytest.approx(STEP_S if found.num_output_tokens > 1 else 0.0)


def _waits_of_queue(requests: list[tuple[float, float]], num_servers: int) -> list[float]:
    """Return the waits of (arrival, service) in a first-come queue, by the recursion of Kiefer and Wolfowitz."""
    free_at_s = [0.0] * num_servers
    waits_s = []
    for arrival_s, service_s in requests:
        begin_s = max(arrival_s, heapq.heappop(free_at_s))
        waits_s.append(begin_s - arrival_s)
        heapq.heappush(free_at_s, begin_s + service_s)
    return waits_s


def _erlang_c_wait(num_servers: int, rho: float, service_s: float) -> float:
    load = rho * num_servers
    terms = [load**number / math.factorial(number) for number in range(num_servers)]
    last = load**num_servers / math.factorial(num_servers) / (1 - rho)
    return last / (sum(terms) + last) * service_s / (num_servers * (1 - rho))
