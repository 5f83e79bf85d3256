"""Writes runs in the form of real ones, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lockstep_engines import TokenTimes
from cluster.simulation.workloads.workload_request import WorkloadRequest

ENGINE = {
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def write_meta(directory: Path, engine: Mapping[str, object] = ENGINE, **sections: object) -> None:
    """Write meta.json. engine: the engine's arguments; sections: further parts"""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meta.json").write_text(json.dumps({"schema_version": 1, "engine_kwargs": dict(engine), **sections}))


def write_requests(directory: Path, workload: Sequence[WorkloadRequest], times: Sequence[TokenTimes]) -> None:
    """Write requests.jsonl: arrivals by a wall clock, and the engine's times by a monotonic one."""
    wall_s, monotonic_s = 1_700_000_000.0, 5000.0
    rows = [
        {
            "request_id": request.request_id,
            "input_toks": request.num_prompt_tokens,
            "output_toks": request.num_output_tokens,
            "arrival_time": wall_s + request.arrival_s,
            "queued_ts": monotonic_s + request.arrival_s,
            "scheduled_ts": monotonic_s + request.arrival_s,
            "first_token_ts": monotonic_s + one.first_s,
            "last_token_ts": monotonic_s + one.last_s,
        }
        for request, one in zip(workload, times, strict=True)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
