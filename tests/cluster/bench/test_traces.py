from __future__ import annotations

from pathlib import Path

import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.traces import read_trace
from cluster.errors import InvalidConfig
from tests.cluster.traces.trace_samples import AZURE, MOONCAKE, line, own_form, trace_file


def test_the_requests_of_a_trace_are_planned_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    assert read_trace(trace_file(tmp_path, MOONCAKE)) == [
        PlannedRequest(0, 0.0, 6, 3),
        PlannedRequest(1, 3.0, 700, 500, (0, 14)),
        PlannedRequest(2, 4.5, 20, 1),
    ]


def test_what_raypd_has_recorded_is_planned(tmp_path: Path) -> None:
    recorded = own_form([line(1, 9.0, block_hashes=(7, 8)), line(2, 5.0)])
    assert read_trace(trace_file(tmp_path, recorded)) == [
        PlannedRequest(0, 0.0, 600, 5),
        PlannedRequest(1, 4.0, 600, 5, (7, 8)),
    ]


def test_a_part_of_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    plan = read_trace(trace_file(tmp_path, AZURE), num_requests=2, speed=4.0)
    assert [one.arrival_s for one in plan] == pytest.approx([0.0, 0.013])


def test_arrivals_in_bins_are_spread_by_the_seed(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp": {3000 * (index // 4)}, "input_length": 6, "output_length": 3}}\n' for index in range(160)
    )
    path = trace_file(tmp_path, rows)
    assert read_trace(path, seed=1) == read_trace(path, seed=1) != read_trace(path, seed=2)
    assert len({one.arrival_s for one in read_trace(path)}) == 160


def test_a_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="line 5: JSON is malformed"):
        read_trace(trace_file(tmp_path, f"{MOONCAKE}nonsense"), num_requests=1)
