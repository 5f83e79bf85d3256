"""Prefixes that simulated engines get from another engine's cache, or from the host's memory.

Tests of cluster/simulation/network/simulated_stores.py.
Tests of cluster/simulation/network/simulated_transfers.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from actors.config import SchedulerConfig
from cluster.routing.decision import RoutingMode
from cluster.simulation.cluster_spec import ClusterSpec, LinkSpec
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.faults.fault import Fault, KillEngine
from cluster.simulation.network.simulated_stores import SimulatedStores
from cluster.simulation.simulation_result import Outcome, SimulatedRequest, SimulationResult
from cluster.simulation.simulator import Simulation, simulate
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import FinishedLoading
from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoredBlock, StoreMetadata
from tests.cluster.simulation.simulated_cluster import constant_steps, make_cluster

BLOCK_BYTES = HASHED_TOKENS * 131_072
CHAIN = tuple(range(100, 120))


def with_transfers(spec: ClusterSpec, **config: object) -> ClusterSpec:
    return replace(spec, kv_transfer=KVTransferConfig.model_validate(config))


def by_id(result: SimulationResult) -> dict[str, SimulatedRequest]:
    return {found.request_id: found for found in result.requests}


@pytest.mark.parametrize("prefix_fetch", [True, False])
def test_a_prefix_comes_from_another_engine_that_is_busy(prefix_fetch: bool) -> None:
    # Steps of 0.1 s compute 2048 tokens; a block takes 0.67 ms on the link.
    spec = make_cluster(("prefill", "prefill", "decode"), RoutingMode.DISAGGREGATE, step_times=constant_steps(0.1))
    spec = replace(with_transfers(spec, prefix_fetch=prefix_fetch), links=LinkSpec(1e11, 1e-4))
    own = tuple(range(1000, 1100))
    offered = [
        WorkloadRequest("first", 0.0, 10_240, 2, CHAIN),
        WorkloadRequest("long", 5.0, 60_000, 2, CHAIN + own),
        WorkloadRequest("same", 5.01, 10_240, 2, CHAIN),
    ]

    found = by_id(simulate(spec, offered, seed=1))

    first, same = found["first"], found["same"]
    assert found["long"].prefill_engine == first.prefill_engine, "the engine that has the prefix"
    assert same.prefill_engine not in (None, first.prefill_engine), "the other one, which is idle"
    if prefix_fetch:
        assert same.num_cached_tokens == 19 * HASHED_TOKENS, "all but the last token's block"
        # The engine that has the prefix sends it once its step is over; then one step computes the rest.
        sent_s = 19 * BLOCK_BYTES / 1e11
        assert 0.1 + sent_s < same.ttft_s < 0.1 + sent_s + 0.1 + 0.01
    else:
        assert same.num_cached_tokens == 0
        assert same.ttft_s == pytest.approx(5 * 0.1, abs=0.01)


def test_an_evicted_prefix_comes_from_the_hosts_memory() -> None:
    spec = make_cluster(["both"], num_blocks=24, step_times=constant_steps(0.01))
    spec = replace(with_transfers(spec, cpu_cache_gib=2.0), host_bytes_per_s=10e9)
    offered = [
        WorkloadRequest("first", 0.0, 10_240, 2, CHAIN),
        WorkloadRequest("other", 5.0, 10_240, 2, tuple(range(200, 220))),
        WorkloadRequest("again", 10.0, 10_240, 2, CHAIN),
    ]

    kept = by_id(simulate(spec, offered, seed=1))["again"]
    lost = by_id(simulate(with_transfers(spec), offered, seed=1))["again"]

    # The engine still has a few blocks of the first prompt; the others come from the host, one after the other.
    assert kept.num_cached_tokens == 19 * HASHED_TOKENS
    num_loaded = 19 - lost.num_cached_tokens // HASHED_TOKENS
    assert num_loaded >= 16
    assert kept.ttft_s == pytest.approx(num_loaded * BLOCK_BYTES / 10e9 + 0.01)


def test_a_host_tier_without_room_for_a_block_is_refused() -> None:
    spec = with_transfers(make_cluster(["both"]), cpu_cache_gib=0.01)
    with pytest.raises(ValueError, match="too small for one block of 67108864 bytes"):
        simulate(spec, [], seed=1)


def test_loads_from_the_host_come_one_after_the_other_and_end_at_once_when_cancelled() -> None:
    events, reports = EventQueue(), list[tuple[float, FinishedLoading]]()
    stores = SimulatedStores(events, 0.5, lambda report: reports.append((events.now_s, report)))
    loads = tuple(
        BlockLoad(name, tuple(StoredBlock(0, bytes([block]), block) for block in range(4))) for name in ("a", "b", "c")
    )

    stores.start_step(StoreMetadata(loads=loads))
    events.at(3.25, stores.start_step, StoreMetadata(cancelled_loads=("b", "c", "unknown")))
    events.run(100.0, lambda: False)

    assert reports == [
        (2.0, FinishedLoading("a", LoadedBlocks(4))),
        (3.25, FinishedLoading("b", LoadedBlocks(2, "cancelled"))),
        (3.25, FinishedLoading("c", LoadedBlocks(0, "cancelled"))),
    ]


def conversations(num_requests: int, per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Prompts that begin as one of four texts does, for up to 12 blocks."""
    draw, arrival_s = random.Random(seed), 0.0
    for index in range(num_requests):
        arrival_s += draw.expovariate(per_s)
        text, num_blocks = draw.randrange(4), draw.randint(1, 12)
        hashes = (*range(100 * text, 100 * text + num_blocks), 10_000 + index)
        num_tokens = num_blocks * HASHED_TOKENS + draw.randint(1, HASHED_TOKENS)
        yield WorkloadRequest(f"r{index}", arrival_s, num_tokens, draw.randint(1, 80), hashes)


# Without shrinking, which takes minutes: a failing case is small enough.
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    mode=st.sampled_from(list(RoutingMode)),
    num_blocks=st.sampled_from([16, 40, 400]),
    per_s=st.floats(2.0, 30.0),
    cpu_cache_gib=st.sampled_from([0.0, 0.5, 4.0]),
    load_timeout_s=st.sampled_from([0.01, 10.0]),
    seed=st.integers(0, 1000),
    faults=st.lists(st.builds(KillEngine, st.floats(0.1, 3.0), st.sampled_from(["decode-1", "both-2"])), max_size=1),
)
def test_many_decode_steps_at_once_change_nothing_where_prefixes_are_loaded(
    mode: RoutingMode,
    num_blocks: int,
    per_s: float,
    cpu_cache_gib: float,
    load_timeout_s: float,
    seed: int,
    faults: list[Fault],
) -> None:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024)
    spec = make_cluster(("prefill", "decode", "both"), mode, num_blocks=num_blocks, scheduler=config)
    spec = with_transfers(spec, cpu_cache_gib=cpu_cache_gib, prefix_load_timeout_s=load_timeout_s)
    spec = replace(spec, restart_s=1.5)

    def run(*, fast_forward: bool) -> SimulationResult:
        simulation = Simulation(spec, 3, keep_decisions=True, fast_forward=fast_forward)
        for fault in faults:
            simulation.plan_fault(fault)
        result = simulation.run(conversations(25, per_s, seed), float("inf"))
        simulation.settle(30.0)
        simulation.check_integrity()
        assert simulation.num_held_blocks == 0
        return result

    many, single = run(fast_forward=True), run(fast_forward=False)

    assert msgspec.json.encode(many) == msgspec.json.encode(single)
    assert {found.outcome for found in many.requests} == {Outcome.COMPLETE}
