"""Tests the validation of the simulator, and holds it against the real runs that are kept in tests/data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest
import typer
from typer.testing import CliRunner, Result

from actors.config import CacheConfig, SchedulerConfig
from benchmarks.gpu_runs import read_gpu_run
from benchmarks.lockstep_engines import TokenTimes, run_in_lockstep
from benchmarks.validate_simulator import METRICS, Validation, load, main, simulate_run, validate
from cluster.errors import InvalidConfig
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.benchmarks.gpu_run_files import ENGINE, write_meta, write_requests
from tests.cluster.simulation.timing.op_directories import SHAPE, write_ops

_DATA: Final = Path(__file__).parents[1] / "data" / "llmservingsim"
_NUM_FITTED: Final = 10
_TWO_ENGINES: Final = {**ENGINE, "data_parallel_size": 2, "enable_expert_parallel": True}


def _write_run(
    tmp_path: Path, slowness: float, engine: Mapping[str, object] = ENGINE, *, with_experts: bool = False
) -> None:
    """Write a run whose engine took so many times as long for each step as its tables say."""
    workload = [WorkloadRequest(f"r{index}", 0.003 * index, 50 + 7 * index, 30) for index in range(40)]
    write_meta(tmp_path, engine)
    write_requests(tmp_path, workload, [TokenTimes(0.1, 0.2)] * len(workload))
    (tmp_path / "shape.json").write_text(SHAPE.model_dump_json())
    run = read_gpu_run(tmp_path)
    tables = read_op_tables(write_ops(tmp_path, with_experts=with_experts), SHAPE, run.layout)
    write_requests(tmp_path, workload, simulate_run(run, tables.slower_by(slowness), SHAPE.num_kv_tokens))


def _validate(tmp_path: Path) -> Validation:
    run, tables, num_kv_tokens = load(tmp_path, tmp_path, tmp_path / "shape.json")
    return validate(run, tables, num_kv_tokens, _NUM_FITTED)


def test_the_fitted_factor_is_that_by_which_the_engine_was_slower(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.3)
    found = _validate(tmp_path)
    assert found.factor == pytest.approx(1.3, rel=0.01)
    assert found.largest_error < 0.02
    assert all(found.error(metric, is_corrected=False) < -0.15 for metric in METRICS)
    assert (found.num_judged, found.num_extrapolated) == (30, 0)


def test_the_number_of_engines_and_their_experts_are_obeyed(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.2, _TWO_ENGINES, with_experts=True)
    assert _validate(tmp_path).largest_error < 0.02
    write_meta(tmp_path)
    assert _validate(tmp_path).largest_error > 0.1, "one engine takes other times than two"


def test_the_size_of_the_cache_in_meta_goes_before_that_of_the_shape(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.0)
    assert load(tmp_path, tmp_path, tmp_path / "shape.json")[2] == SHAPE.num_kv_tokens
    write_meta(tmp_path, ENGINE, kv_cache={"num_kv_tokens": 1600})
    assert load(tmp_path, tmp_path, tmp_path / "shape.json")[2] == 1600


def test_a_run_without_requests_to_judge_is_refused(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.0)
    run, tables, num_kv_tokens = load(tmp_path, tmp_path, tmp_path / "shape.json")
    with pytest.raises(InvalidConfig, match="40 of 40 requests leave none to judge"):
        validate(run, tables, num_kv_tokens, 40)


def test_a_run_whose_first_requests_have_one_token_each_is_refused(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.0)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    single = [line.replace('"output_toks": 30', '"output_toks": 1') for line in lines[:_NUM_FITTED]]
    (tmp_path / "requests.jsonl").write_text("\n".join([*single, *lines[_NUM_FITTED:]]))
    with pytest.raises(InvalidConfig, match="none of the first 10 requests has two tokens"):
        _validate(tmp_path)


def test_one_engine_has_the_times_of_a_group_of_one(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.0, {**ENGINE, "max_num_seqs": 4})
    run, tables, num_kv_tokens = load(tmp_path, tmp_path, tmp_path / "shape.json")
    workload = [
        WorkloadRequest(one.request_id, one.arrival_s, one.num_prompt_tokens, one.num_output_tokens)
        for one in run.requests
    ]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, watermark=0.0, fairness="none")
    cache = CacheConfig(block_size=run.block_size, enable_kv_events=False)
    group = run_in_lockstep(workload, tables, scheduler, cache, num_kv_tokens // run.block_size - 1, 4096)
    simulated = simulate_run(run, tables, num_kv_tokens)
    for metric in ("first_s", "last_s"):
        expected = [getattr(times, metric) for times in group]
        assert [getattr(times, metric) for times in simulated] == pytest.approx(expected)


def _command(tmp_path: Path, limit: float) -> Result:
    app = typer.Typer()
    app.command()(main)
    paths = ["--run", str(tmp_path), "--ops", str(tmp_path), "--shape", str(tmp_path / "shape.json")]
    return CliRunner().invoke(app, [*paths, "--limit", str(limit), "--fit-requests", str(_NUM_FITTED)])


def test_the_command_prints_the_errors_and_ends_with_one_beyond_the_limit(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.3)
    within, beyond = _command(tmp_path, 0.1), _command(tmp_path, 0.0)
    assert within.exit_code == 0, within.output
    assert all(metric in within.output for metric in METRICS)
    assert "fitted to the first 10 requests: 1.3" in within.output
    assert "All corrected errors are within 10.0%." in within.output
    assert beyond.exit_code == 1
    assert "is beyond the limit, 0.0%" in beyond.output


def test_the_command_says_which_file_is_bad(tmp_path: Path) -> None:
    _write_run(tmp_path, 1.0)
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,x\n")
    refused = _command(tmp_path, 0.1)
    assert refused.exit_code == 2
    assert "dense.csv: line 2, column time_us" in "".join(refused.output.split("\n"))


@pytest.mark.more
@pytest.mark.parametrize("gpu", ["RTX4090", "RTXPRO6000"])
def test_the_means_of_a_real_run_are_predicted_within_ten_percent(
    gpu: str, record_property: Callable[[str, object], None]
) -> None:
    run, tables, num_kv_tokens = load(
        _DATA / "runs" / gpu, _DATA / "ops" / gpu / "tp1", _DATA / "runs" / gpu / "shape.json"
    )
    found = validate(run, tables, num_kv_tokens)
    for name, is_corrected in (("uncorrected", False), ("corrected", True)):
        errors = ", ".join(f"{metric} {found.error(metric, is_corrected=is_corrected):+.1%}" for metric in METRICS)
        record_property("figure", f"simulator against vLLM on {gpu}, {name}: {errors}")
    assert found.largest_error <= 0.10
    assert found.factor == pytest.approx(1.0, abs=0.1)
