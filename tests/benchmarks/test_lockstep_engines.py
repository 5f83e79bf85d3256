"""Tests engines that take their steps together."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.config import CacheConfig, SchedulerConfig
from actors.costs.step_shape import StepShape
from benchmarks.lockstep_engines import TokenTimes, run_in_lockstep
from cluster.simulation.timing.op_tables import OpTables, read_op_tables
from cluster.simulation.timing.rank_exchange import RankLayout
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.cluster.simulation.timing.op_directories import SHAPE, write_ops

_CACHE = CacheConfig(block_size=16)


def _serve(
    tables: OpTables, workload: list[WorkloadRequest], *, overlap: bool, num_blocks: int = 1000, max_num_seqs: int = 8
) -> list[TokenTimes]:
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=256, overlap=overlap, watermark=0.0, fairness="none"
    )
    return run_in_lockstep(workload, tables, scheduler, _CACHE, num_blocks, 4096)


def _tables(tmp_path: Path, num_engines: int) -> OpTables:
    layout = RankLayout(data_parallel_size=num_engines, is_expert_parallel=True)
    return read_op_tables(write_ops(tmp_path, with_experts=True), SHAPE, layout)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_alone_takes_its_steps_one_after_the_other(tmp_path: Path, overlap: bool) -> None:
    tables = _tables(tmp_path, 1)
    [times] = _serve(tables, [WorkloadRequest("a", 1.0, 300, 3)], overlap=overlap)
    chunks = [
        StepShape(256, num_prefills=1, num_prefill_pairs=256 * 128),
        StepShape(44, num_prefills=1, num_prefill_context=256, num_prefill_pairs=44 * (256 + 22)),
    ]
    first_s = 1.0 + sum(tables.lockstep_s([chunk]) for chunk in chunks)
    decodes_s = sum(tables.lockstep_s([StepShape(1, 1, context)]) for context in (300, 301))
    assert times.first_s == pytest.approx(first_s)
    assert times.last_s == pytest.approx(first_s + decodes_s)


def test_with_overlap_a_request_waits_for_the_step_that_was_scheduled_before_it_came(tmp_path: Path) -> None:
    tables = _tables(tmp_path, 1)
    workload = [WorkloadRequest("a", 0.0, 16, 50), WorkloadRequest("b", 0.005, 16, 1)]
    plain, ahead = (_serve(tables, workload, overlap=overlap)[1].first_s for overlap in (False, True))
    step_s = tables.lockstep_s([StepShape(1, 1, 20)])
    assert ahead - plain == pytest.approx(step_s, rel=0.2)


def test_two_engines_share_the_requests_and_wait_for_each_other(tmp_path: Path) -> None:
    tables = _tables(tmp_path, 2)
    alone = _serve(tables, [WorkloadRequest("a", 0.0, 16, 20)], overlap=True)
    long_prompt = WorkloadRequest("b", 0.0, 2000, 20)
    both = _serve(tables, [WorkloadRequest("a", 0.0, 16, 20), long_prompt], overlap=True)
    # The other engine's prompt is in no step of this one, but each of its steps lasts until that one's has ended.
    assert both[0].last_s > 1.5 * alone[0].last_s
    chunk_s = tables.lockstep_s([StepShape(256, num_prefills=1, num_prefill_pairs=256 * 128), StepShape(1, 1, 16)])
    assert both[0].first_s == pytest.approx(chunk_s, rel=0.05)


def test_requests_that_do_not_fit_together_are_preempted_and_all_end(tmp_path: Path) -> None:
    tables = _tables(tmp_path, 1)
    workload = [WorkloadRequest(f"r{index}", 0.0, 64, 100) for index in range(6)]
    tight = _serve(tables, workload, overlap=True, num_blocks=30)
    roomy = _serve(tables, workload, overlap=True)
    assert max(one.last_s for one in tight) > max(one.last_s for one in roomy)
    assert all(one.first_s < one.last_s for one in tight)


def test_a_request_that_no_engine_can_take_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a: the engine refuses 5000 tokens"):
        _serve(_tables(tmp_path, 1), [WorkloadRequest("a", 0.0, 5000, 1)], overlap=True)
