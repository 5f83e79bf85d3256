"""Loads that last: routing by cost is about as good as the better of two fixed rules, whichever that is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import KINDS, Residuals
from cluster.routing.decision import RoutingMode
from cluster.simulation.cluster_spec import ClusterSpec, LinkSpec
from cluster.simulation.simulator import simulate
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest
from tests.cluster.simulation.simulated_cluster import COSTS, make_cluster

_NUM_PREFIXES = 4
_PROMPT = 4 * HASHED_TOKENS
_OUTPUT = 64
_SURE = replace(COSTS, residuals=tuple(Residuals(kind, 1000, -0.02, 0.0, 0.02, 0.01) for kind in KINDS))


def _spec(mode: RoutingMode, aims: Slo, bytes_per_s: float) -> ClusterSpec:
    roles = ("both",) * 4 if mode is RoutingMode.AGGREGATE else ("prefill", "prefill", "decode", "decode")
    spec = make_cluster(roles, mode)
    engines = tuple(replace(engine, step_costs=_SURE, ttft_s=aims.ttft_s, itl_s=aims.itl_s) for engine in spec.engines)
    return replace(spec, engines=engines, slo=aims, links=LinkSpec(bytes_per_s, 1e-4))


def _offered(per_s: float, num_requests: int, num_shared_blocks: int) -> Iterator[WorkloadRequest]:
    draw, arrival_s = random.Random(1), 0.0
    for number in range(num_requests):
        arrival_s += draw.expovariate(per_s)
        prefix = draw.randrange(_NUM_PREFIXES)
        shared = (prefix * 10 + block for block in range(num_shared_blocks))
        own = (1000 + number * 10 + block for block in range(4 - num_shared_blocks))
        yield WorkloadRequest(str(number), arrival_s, _PROMPT, _OUTPUT, (*shared, *own))


@pytest.mark.parametrize(
    ("per_s", "num_shared_blocks", "itl_s", "bytes_per_s", "better"),
    [
        pytest.param(50.0, 3, 0.011, 1e10, RoutingMode.DISAGGREGATE, id="common prefixes and a tight aim"),
        pytest.param(18.0, 0, 0.03, 5e8, RoutingMode.AGGREGATE, id="long prompts and narrow links"),
    ],
)
def test_cost_is_about_as_good_as_the_better_rule(
    per_s: float, num_shared_blocks: int, itl_s: float, bytes_per_s: float, better: RoutingMode
) -> None:
    aims = Slo(ttft_s=0.5, itl_s=itl_s)
    shares = {
        mode: simulate(
            _spec(mode, aims, bytes_per_s), _offered(per_s, int(12 * per_s), num_shared_blocks), seed=1
        ).good_share(aims)
        for mode in RoutingMode
    }
    other = RoutingMode.DISAGGREGATE if better is RoutingMode.AGGREGATE else RoutingMode.AGGREGATE
    assert shares[better] > 0.8
    assert shares[other] < 0.7 * shares[better], "the other rule would lose"
    assert shares[RoutingMode.COST] >= 0.95 * shares[better]
