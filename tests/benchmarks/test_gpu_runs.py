"""Tests the reading of runs of real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_runs import read_gpu_run
from benchmarks.lockstep_engines import TokenTimes
from cluster.errors import InvalidConfig
from cluster.simulation.timing.rank_exchange import RankLayout
from cluster.simulation.workloads.workload_request import WorkloadRequest
from tests.benchmarks.gpu_run_files import ENGINE, write_meta, write_requests

_DATA = Path(__file__).parents[1] / "data" / "llmservingsim" / "runs"


def _write(directory: Path) -> None:
    workload = [WorkloadRequest("b", 0.5, 20, 3), WorkloadRequest("a", 0.0, 10, 2)]
    write_requests(directory, workload, [TokenTimes(0.75, 1.5), TokenTimes(0.25, 1.0)])


def test_times_count_from_the_first_arrival_by_one_clock(tmp_path: Path) -> None:
    write_meta(tmp_path)
    _write(tmp_path)
    run = read_gpu_run(tmp_path)
    assert [request.request_id for request in run.requests] == ["a", "b"]
    times = [(request.arrival_s, request.first_token_s, request.end_s) for request in run.requests]
    assert times == [pytest.approx((0.0, 0.25, 1.0)), pytest.approx((0.5, 0.75, 1.5))]


def test_the_wait_for_the_end_of_a_step_is_part_of_a_requests_time(tmp_path: Path) -> None:
    write_meta(tmp_path)
    _write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    rows[0]["queued_ts"] += 0.2
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_gpu_run(tmp_path).requests[1].first_token_s == pytest.approx(0.75)


def test_without_a_word_in_meta_the_defaults_of_vllm_hold(tmp_path: Path) -> None:
    write_meta(tmp_path, {})
    _write(tmp_path)
    run = read_gpu_run(tmp_path)
    assert (run.max_num_seqs, run.max_num_batched_tokens, run.block_size) == (256, 2048, 16)
    assert run.has_overlap
    assert run.has_chunked_prefill
    assert run.has_prefix_caching
    assert run.layout == RankLayout()
    assert run.num_kv_tokens is None


def test_ranks_and_cache_are_those_of_meta_and_the_cache_is_that_of_one_engine(tmp_path: Path) -> None:
    engine = ENGINE | {"data_parallel_size": 2, "tensor_parallel_size": 4, "enable_expert_parallel": True}
    write_meta(tmp_path, engine, kv_cache={"num_kv_tokens": 64_000, "num_gpu_blocks": 4000, "block_size": 16})
    _write(tmp_path)
    run = read_gpu_run(tmp_path)
    assert run.layout == RankLayout(2, 4, is_expert_parallel=True)
    assert run.num_kv_tokens == 32_000


def test_what_the_engine_made_of_its_arguments_goes_before_them(tmp_path: Path) -> None:
    resolved = {"scheduler_config": {"max_num_seqs": 4, "async_scheduling": False}, "cache_config": {"block_size": 32}}
    write_meta(tmp_path, ENGINE, resolved_config=resolved)
    _write(tmp_path)
    run = read_gpu_run(tmp_path)
    assert (run.max_num_seqs, run.has_overlap, run.block_size) == (4, False, 32)


def test_requests_without_times_are_left_out_and_counted(tmp_path: Path) -> None:
    write_meta(tmp_path)
    _write(tmp_path)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write('{"request_id": "c", "input_toks": 1, "output_toks": 1, "arrival_time": null}\n')
    run = read_gpu_run(tmp_path)
    assert (len(run.requests), run.num_without_times) == (2, 1)


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("{", "line 3: "),
        ('{"request_id": "c", "input_toks": 1.5, "output_toks": 1}', r"line 3: .*input_toks"),
        (
            '{"request_id": "c", "input_toks": 0, "output_toks": 1}',
            "line 3: input_toks and output_toks must be at least 1",
        ),
        ('{"request_id": "c", "output_toks": 1}', "line 3: "),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, mistake: str) -> None:
    write_meta(tmp_path)
    _write(tmp_path)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidConfig, match=mistake):
        read_gpu_run(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "mistake"),
    [
        ("max_num_seqs", "many", "max_num_seqs: 'many' is no whole number of at least 1"),
        ("data_parallel_size", 0, "data_parallel_size: 0 is no whole number"),
        ("enable_expert_parallel", 1, "enable_expert_parallel: 1 is neither true nor false"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(tmp_path: Path, field: str, value: object, mistake: str) -> None:
    write_meta(tmp_path, ENGINE | {field: value})
    _write(tmp_path)
    with pytest.raises(InvalidConfig, match=mistake):
        read_gpu_run(tmp_path)


def test_the_kept_runs_say_how_their_engines_were_set_up() -> None:
    ada, blackwell = read_gpu_run(_DATA / "RTX4090"), read_gpu_run(_DATA / "RTXPRO6000")
    assert (len(ada.requests), ada.max_num_seqs, ada.num_kv_tokens, ada.max_model_len) == (300, 256, 41_408, 32_768)
    assert (len(blackwell.requests), blackwell.max_num_seqs, blackwell.num_kv_tokens) == (300, 128, None)
