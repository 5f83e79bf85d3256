"""Preempted requests move to an engine with room, in virtual time.

Tests of cluster/simulation/ingresses/moves.py.
Tests of cluster/simulation/ingresses/simulated_session.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import Preemption
from cluster.routing.decision import RoutingMode
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.faults.fault import Fault, KillEngine
from cluster.simulation.ingresses.moves import Flight, Moves
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress
from cluster.simulation.simulation_result import Outcome, SimulationResult
from cluster.simulation.simulator import Simulation, simulate
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.cluster.simulation.simulated_cluster import make_cluster, make_workload, with_ingress


def crowded(roles: Sequence[str] = ("both", "both"), mode: RoutingMode = RoutingMode.COST) -> ClusterSpec:
    """A cluster whose first engine has few blocks, and whose other ones have many."""
    spec = make_cluster(roles, mode, block_size=16)
    first, *others = spec.engines
    return replace(spec, engines=(replace(first, num_blocks=60), *(replace(other, num_blocks=400) for other in others)))


def long_answers() -> Iterator[WorkloadRequest]:
    """Answers that are longer than routing expects at first."""
    return make_workload(60, 20.0, max_prompt=300, max_output=500, hashed=0.0)


def run(spec: ClusterSpec, faults: Sequence[Fault] = ()) -> SimulationResult:
    """Serve the workload, and check that every request gets its tokens and that nothing is left behind."""
    simulation = Simulation(spec, 1, keep_decisions=False, fast_forward=True)
    for fault in faults:
        simulation.plan_fault(fault)
    result = simulation.run(long_answers(), float("inf"))
    simulation.settle(1.0)
    simulation.check_integrity()
    assert simulation.num_held_blocks == 0
    assert [found.outcome for found in result.requests] == [Outcome.COMPLETE] * 60
    assert [found.num_output_tokens for found in result.requests] == [
        offered.num_output_tokens for offered in long_answers()
    ]
    return result


def num_moves(result: SimulationResult) -> int:
    """How often requests have moved."""
    return sum(found.num_moves for found in result.requests)


@pytest.mark.parametrize(
    ("roles", "mode"),
    [
        (("both", "both"), RoutingMode.AGGREGATE),
        (("decode", "decode", "prefill"), RoutingMode.COST),
    ],
)
def test_preempted_requests_move_and_their_clients_wait_less(roles: Sequence[str], mode: RoutingMode) -> None:
    moved = run(crowded(roles, mode))
    stayed = run(with_ingress(crowded(roles, mode), move_preempted=False))

    assert num_moves(moved) > 0
    assert num_moves(stayed) == 0
    assert moved.duration_s < stayed.duration_s
    assert max(found.itl_max_s for found in moved.requests) < max(found.itl_max_s for found in stayed.requests)
    assert {found.num_attempts for found in moved.requests} == {1}


def test_a_request_that_has_moved_ends_where_there_was_room() -> None:
    moved = [found for found in run(crowded()).requests if found.num_moves == 1]
    assert {found.decode_engine for found in moved} == {"both-1"}


def test_a_request_does_not_move_to_an_engine_whose_report_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner wants counters of the last two seconds; what is preempted later stays."""
    begun_s = times_of_moves(monkeypatch)
    run(crowded())
    early_s = begun_s[:]
    begun_s.clear()
    run(replace(crowded(), stats_interval_s=1000.0))
    assert begun_s
    assert max(begun_s) <= 2.0 < max(early_s), "engines report as they begin to serve"


def test_many_decode_steps_at_once_change_nothing_about_moves() -> None:
    many, single = (simulate(crowded(), long_answers(), seed=1, fast_forward=fast) for fast in (True, False))
    assert num_moves(many) > 0
    assert many.requests == single.requests


@pytest.mark.parametrize(("engine_id", "name"), [("both-0", "_take_over"), ("both-1", "on_target_lost")])
def test_a_request_goes_on_though_one_end_of_its_move_dies(
    engine_id: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_s, calls = times_of_moves(monkeypatch), Counter[str]()
    count_calls(monkeypatch, SimulatedIngress if name == "_take_over" else Moves, name, calls)
    spec = replace(crowded(), restart_s=3.0, death_noticed_s=1e-4)
    run(spec)
    assert not calls

    run(spec, [KillEngine(begun_s[2] + 1e-4, engine_id)])
    assert calls[name] > 0


def times_of_moves(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times at which moves begin, which come in as a simulation runs."""
    method, begun_s = Moves.on_preemption, list[float]()

    def noted(moves: Moves, flight: Flight, preemption: Preemption) -> None:
        method(moves, flight, preemption)
        if flight.move is not None:
            begun_s.append(moves.clock())

    monkeypatch.setattr(Moves, "on_preemption", noted)
    return begun_s


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: Counter[str]) -> None:
    """Count the calls of a method."""
    method = getattr(owner, name)

    def counted(*args: object) -> object:
        calls[name] += 1
        return method(*args)

    monkeypatch.setattr(owner, name, counted)
