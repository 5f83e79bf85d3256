from __future__ import annotations

import msgspec
import pytest

from actors.core.requests.slo import Slo
from cluster.simulation.simulation_result import EngineTotals, Outcome, SimulatedRequest, SimulationResult

GOOD = SimulatedRequest(
    "good", 1.0, 100, Outcome.COMPLETE, 1.5, 3.5, num_output_tokens=5, itl_p50_s=0.5, itl_p99_s=0.5, itl_max_s=0.5
)


def test_times_follow_from_moments() -> None:
    assert (GOOD.ttft_s, GOOD.e2e_s, GOOD.tpot_s) == (0.5, 2.5, 0.5)
    assert msgspec.structs.replace(GOOD, num_output_tokens=1).tpot_s == 0.0


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        ({}, True),
        ({"outcome": Outcome.FAILED}, False),
        ({"first_token_s": 1.6}, False),
        ({"end_s": 3.6}, False),
        ({"itl_p99_s": 0.6}, True),
        ({"first_token_s": 1.6, "ttft_aim_s": 1.0}, True),
        ({"itl_aim_s": 0.1}, False),
    ],
)
def test_a_request_meets_its_own_aims_before_those_of_the_cluster(changes: dict[str, object], is_good: bool) -> None:
    assert msgspec.structs.replace(GOOD, **changes).meets(Slo(ttft_s=0.5, itl_s=0.5)) == is_good


def test_goodput_counts_what_was_offered() -> None:
    bad = msgspec.structs.replace(GOOD, arrival_s=5.0, outcome=Outcome.REFUSED)
    engine = EngineTotals("both-0", 1.0, 3.0, 10, 100, 5, 0, 0, held_s=4.0)
    result = SimulationResult([GOOD, bad], [engine, engine], (), 9.0)

    assert result.good_share(Slo()) == 0.5
    assert result.goodput(Slo()) == 1 / 4
    assert result.engine_seconds == 8.0
    assert SimulationResult([], [], (), 0.0).good_share(Slo()) == 1.0
