"""Whole simulations: what clients get, what faults do, and that nothing is left behind.

Tests of cluster/simulation/simulator.py.
Tests of cluster/simulation/cluster_spec.py.
Tests of cluster/simulation/engines/decode_run.py.
Tests of cluster/simulation/faults/fault.py.
Tests of cluster/simulation/ingresses/request_flight.py.
Tests of cluster/simulation/engines/simulated_engine.py.
Tests of cluster/simulation/engines/simulated_scheduler.py.
Tests of cluster/simulation/ingresses/simulated_ingress.py.
Tests of cluster/simulation/network/open_transfers.py.
Tests of cluster/simulation/network/simulated_transfers.py.
Tests of cluster/simulation/workloads/workload_request.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from actors.config import SchedulerConfig
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.sent_work import SentWork
from actors.core.scheduler import Scheduler
from cluster.routing.decision import RoutingMode, Way
from cluster.simulation.engines import simulated_engine
from cluster.simulation.engines.decode_run import has_work
from cluster.simulation.engines.simulated_engine import SimulatedEngine
from cluster.simulation.faults.fault import Fault, KillEngine, Partition, SlowEngine, StopEngine
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress
from cluster.simulation.simulation_result import Outcome, SimulationResult
from cluster.simulation.simulator import Simulation, simulate
from cluster.simulation.workloads.workload_request import WorkloadRequest
from kv_transfer.sides.scheduler_side import SchedulerSide
from tests.cluster.simulation.simulated_cluster import (
    constant_steps,
    make_cluster,
    make_workload,
    with_ingress,
)
from tests.patience import TEST_S

PAIR = ("prefill", "decode")


def test_requests_get_all_their_tokens_and_nothing_stays_behind() -> None:
    simulation = Simulation(make_cluster((*PAIR, "both")), 1, keep_decisions=True, fast_forward=True)
    offered = list(make_workload(60, 8.0))

    result = simulation.run(iter(offered), float("inf"))
    simulation.settle(1.0)

    assert [found.outcome for found in result.requests] == [Outcome.COMPLETE] * 60
    assert [found.num_output_tokens for found in result.requests] == [one.num_output_tokens for one in offered]
    assert sum(engine.num_output_tokens for engine in result.engines) == sum(one.num_output_tokens for one in offered)
    # Each submission has one: a request that waits for long may be submitted again.
    assert len(result.decisions) == sum(found.num_attempts for found in result.requests) >= 60
    assert simulation.num_held_blocks == 0
    simulation.check_integrity()


def test_a_request_alone_takes_its_steps_and_its_transfer() -> None:
    # Steps of 10 ms; 1024 tokens are one step and 2 blocks, 134 MB, or 13.4 ms.
    spec = make_cluster(PAIR, RoutingMode.DISAGGREGATE, step_times=constant_steps(0.01))

    [found] = simulate(spec, [WorkloadRequest("r", 1.0, 1024, 3)], seed=0).requests

    assert (found.way, found.prefill_engine, found.decode_engine) == (Way.PREFILL_DECODE, "prefill-0", "decode-1")
    # READY takes the link's latency; so does the last byte.
    assert found.first_token_s == pytest.approx(1.0 + 1e-4 + 0.01)
    sent_s = 1024 * 131_072 / 1e10
    assert found.end_s == pytest.approx(found.first_token_s + sent_s + 1e-4 + 2 * 0.01)
    assert found.itl_max_s == pytest.approx(sent_s + 1e-4 + 0.01)
    assert found.itl_p50_s == pytest.approx(0.01)


def test_the_same_simulation_twice_has_the_same_bytes() -> None:
    spec = replace(make_cluster((*PAIR, "both")), num_ingresses=2, restart_s=2.0)
    faults = [KillEngine(1.5, "both-2")]

    one, other = (
        _bytes(simulate(spec, make_workload(80, 8.0), seed=7, faults=faults, keep_decisions=True)) for _ in range(2)
    )

    assert one == other
    assert one != _bytes(simulate(spec, make_workload(80, 8.0), seed=8, faults=faults, keep_decisions=True))


FAULTS = st.lists(
    st.one_of(
        st.builds(KillEngine, st.floats(0.1, 4.0), st.just("both-2")),
        st.builds(KillEngine, st.floats(0.1, 4.0), st.just("decode-1")),
        st.builds(SlowEngine, st.floats(0.1, 2.0), st.floats(2.1, 4.0), st.just("prefill-0"), st.floats(1.0, 4.0)),
        st.builds(StopEngine, st.floats(0.1, 2.0), st.floats(2.1, 7.0), st.just("decode-1")),
        st.builds(Partition, st.floats(0.1, 2.0), st.floats(2.1, 9.0), st.just(frozenset({"prefill-0"}))),
    ),
    max_size=2,
)


# Without shrinking, which takes minutes: a failing case is small enough.
@pytest.mark.timeout(TEST_S)
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    mode=st.sampled_from(list(RoutingMode)),
    num_blocks=st.sampled_from([40, 90, 2000]),
    per_s=st.floats(1.0, 30.0),
    max_prompt=st.sampled_from([20, 300]),
    max_output=st.sampled_from([5, 120]),
    batched_tokens=st.sampled_from([32, 256]),
    workload_seed=st.integers(0, 1000),
    faults=FAULTS,
)
# A preempted request is computed again in two chunks, of which the second one has a single token.
@example(
    mode=RoutingMode.DISAGGREGATE,
    num_blocks=40,
    per_s=30.0,
    max_prompt=20,
    max_output=120,
    batched_tokens=32,
    workload_seed=391,
    faults=[],
)
def test_many_decode_steps_at_once_change_nothing(
    mode: RoutingMode,
    num_blocks: int,
    per_s: float,
    max_prompt: int,
    max_output: int,
    batched_tokens: int,
    workload_seed: int,
    faults: list[Fault],
) -> None:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=batched_tokens)
    spec = make_cluster((*PAIR, "both"), mode, num_blocks=num_blocks, block_size=16, scheduler=config)
    spec = replace(spec, restart_s=1.5)

    def run(*, fast_forward: bool) -> SimulationResult:
        simulation = Simulation(spec, 3, keep_decisions=True, fast_forward=fast_forward)
        for fault in faults:
            simulation.plan_fault(fault)
        workload = make_workload(25, per_s, workload_seed, max_prompt=max_prompt, max_output=max_output, hashed=0.0)
        result = simulation.run(workload, float("inf"))
        simulation.settle(30.0)
        simulation.check_integrity()
        assert simulation.num_held_blocks == 0
        return result

    many, single = run(fast_forward=True), run(fast_forward=False)

    assert _bytes(many) == _bytes(single)
    # A request with which two engines have died is given up.
    num_kills = sum(isinstance(fault, KillEngine) for fault in faults)
    ends = {Outcome.COMPLETE, Outcome.FAILED} if num_kills > 1 else {Outcome.COMPLETE}
    assert {found.outcome for found in many.requests} <= ends


@pytest.mark.parametrize("engine_id", ["prefill-0", "decode-1"])
def test_a_kill_loses_no_request(engine_id: str) -> None:
    spec = replace(make_cluster((*PAIR, "decode"), RoutingMode.DISAGGREGATE), restart_s=3.0)
    offered = list(make_workload(60, 10.0))

    result = simulate(spec, offered, seed=1, faults=[KillEngine(2.0, engine_id)])

    assert [found.outcome for found in result.requests] == [Outcome.COMPLETE] * 60
    assert [found.num_output_tokens for found in result.requests] == [one.num_output_tokens for one in offered]
    decode_died = engine_id == "decode-1"
    assert any(found.num_attempts > 1 for found in result.requests) == decode_died


def test_a_short_partition_delays_handoffs_and_breaks_none() -> None:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=32)
    spec = make_cluster(PAIR, RoutingMode.DISAGGREGATE, num_blocks=2000, block_size=16, scheduler=config)
    workload = make_workload(25, 15.0, 223, max_prompt=300, max_output=20, hashed=0.0)

    result = simulate(spec, workload, seed=3, faults=[Partition(0.5, 1.7, frozenset({"prefill-0"}))])

    assert {found.outcome for found in result.requests} == {Outcome.COMPLETE}


def test_a_cluster_whose_only_engine_dies_for_good_gives_its_requests_up() -> None:
    spec = with_ingress(make_cluster(["both"]), recovery_timeout_s=5)

    result = simulate(spec, make_workload(5, 100.0), seed=1, faults=[KillEngine(0.1, "both-0")])

    assert {found.outcome for found in result.requests} == {Outcome.FAILED}
    assert result.duration_s == pytest.approx(0.1 + 1.0 + 5.0)


def test_a_slow_engine_takes_longer() -> None:
    spec = make_cluster(["both"], step_times=constant_steps(0.01))
    offered = [WorkloadRequest("r", 0.0, 100, 101)]

    [usual], [slow] = (
        simulate(spec, offered, seed=1, faults=faults).requests
        for faults in ([], [SlowEngine(0.5, 9.0, "both-0", 2.0)])
    )

    assert usual.end_s == pytest.approx(101 * 0.01)
    # The step under way at 0.5 s is the last usual one.
    assert slow.end_s == pytest.approx(0.5 + (101 - 50) * 0.02, abs=0.011)


def test_what_does_not_fit_is_refused() -> None:
    spec = with_ingress(make_cluster(["both"], num_blocks=4), max_requests_in_flight=1)
    offered = [
        WorkloadRequest("long", 0.0, 5 * 512, 2),
        WorkloadRequest("good", 1.0, 512, 100),
        WorkloadRequest("second at once", 1.1, 512, 2),
    ]

    result = simulate(spec, offered, seed=1)

    assert [found.outcome for found in result.requests] == [Outcome.REFUSED, Outcome.COMPLETE, Outcome.REFUSED]


def test_shared_prefixes_are_found_in_the_cache() -> None:
    spec = make_cluster(["both"])
    offered = [
        WorkloadRequest("first", 0.0, 1100, 2, (7, 8, 9)),
        WorkloadRequest("same", 1.0, 1100, 2, (7, 8, 9)),
        WorkloadRequest("half", 2.0, 1100, 2, (7, 5, 6)),
        WorkloadRequest("none", 3.0, 1100, 2),
    ]

    result = simulate(spec, offered, seed=1)

    assert [found.num_cached_tokens for found in result.requests] == [0, 1024, 512, 0]


def test_an_engine_that_sleeps_has_nothing_to_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(scheduler: Scheduler, connector: SchedulerSide, now_s: float) -> bool:
        asked.append(found := has_work(scheduler, connector, now_s))
        if not found:
            output = scheduler.schedule()
            assert output.is_empty()
            assert scheduler.update_from_output(output, ModelRunnerOutput([], [])) == {}
        return found

    asked: list[bool] = []
    spec = replace(make_cluster((*PAIR, "both"), num_blocks=40), restart_s=2.0)
    faults: list[Fault] = [KillEngine(2.0, "both-2"), Partition(3.0, 9.0, frozenset({"prefill-0"}))]
    plain = simulate(spec, make_workload(60, 8.0), seed=1, faults=faults)
    monkeypatch.setattr(simulated_engine, "has_work", checked)

    assert _bytes(simulate(spec, make_workload(60, 8.0), seed=1, faults=faults)) == _bytes(plain)
    assert set(asked) == {False, True}


def test_two_ingresses_hear_of_each_others_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int, int]] = []
    take = SimulatedIngress.on_announced

    def on_announced(
        self: SimulatedIngress,
        engine: SimulatedEngine,
        num_submitted: int,
        works: Sequence[SentWork],
        left: Sequence[SentWork],
    ) -> None:
        told.append((self.number, num_submitted, len(works), len(left)))
        take(self, engine, num_submitted, works, left)

    monkeypatch.setattr(SimulatedIngress, "on_announced", on_announced)

    simulate(replace(make_cluster(["both"]), num_ingresses=2), make_workload(30, 8.0), seed=1)

    assert [number for _, number, num_works, _ in told if num_works] == list(range(1, 31)), "each is told, in order"
    assert sum(num_left for *_, num_left in told) == 29, "and each end, but for the last one, which is the end"
    assert {ingress for ingress, *_ in told} == {0, 1}


def test_a_workload_out_of_order_is_refused() -> None:
    offered = [WorkloadRequest("late", 2.0, 10, 2), WorkloadRequest("early", 1.0, 10, 2)]
    with pytest.raises(ValueError, match=r"request early comes at 1\.0 s, and the one before it at 2\.0 s"):
        simulate(make_cluster(["both"]), offered, seed=1)


def test_hashes_of_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="the engines' blocks have 16"):
        simulate(make_cluster(["both"], block_size=16), [WorkloadRequest("r", 0.0, 600, 2, (1, 2))], seed=1)


def test_a_fault_of_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="a fault names both-9; engines are: both-0"):
        simulate(make_cluster(["both"]), [], seed=1, faults=[KillEngine(1.0, "both-9")])


@pytest.mark.timeout(TEST_S)
def test_ten_thousand_requests_over_fifty_engines() -> None:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192)
    spec = make_cluster([*PAIR, "decode", "both", "both"] * 10, scheduler=config)

    result = simulate(spec, make_workload(10_000, 150.0, max_prompt=3000, max_output=60), seed=1)

    assert {found.outcome for found in result.requests} == {Outcome.COMPLETE}
    assert {found.way for found in result.requests} == set(Way)
    assert result.good_share(spec.slo) > 0.5


def _bytes(result: SimulationResult) -> bytes:
    return msgspec.json.encode(result)
