"""A trace is offered as a workload.

Tests of cluster/simulation/workloads/trace_workload.py and cluster/simulation/workloads/workload_request.py.
"""

from __future__ import annotations

from pathlib import Path

from cluster.simulation.workloads.trace_workload import trace_requests
from cluster.simulation.workloads.workload_request import WorkloadRequest
from cluster.traces.trace_reader import open_trace
from tests.cluster.traces.trace_samples import MOONCAKE, line, own_form, trace_file


def test_a_trace_is_offered_with_its_hashes_at_another_rate(tmp_path: Path) -> None:
    trace = open_trace(trace_file(tmp_path, MOONCAKE))
    assert list(trace_requests(trace, rate_scale=2.0, num_requests=2)) == [
        WorkloadRequest("0", 0.0, 6, 3),
        WorkloadRequest("1", 1.5, 700, 500, (0, 14)),
    ]


def test_what_raypd_has_recorded_keeps_tenants_and_aims(tmp_path: Path) -> None:
    recorded = own_form([line(1, 5.0, tenant="a", ttft_aim_s=0.5, itl_aim_s=0.05, block_hashes=(7, 8))])
    assert list(trace_requests(open_trace(trace_file(tmp_path, recorded)))) == [
        WorkloadRequest("1", 0.0, 600, 5, (7, 8), "a", 0.5, 0.05)
    ]
