"""The rows of the table of clusters."""

from __future__ import annotations

from benchmarks.serving import cells_of
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.bench.summary import summarise
from tests.cluster.bench.runs import load_result, record


def test_a_row_has_the_clients_figures_and_the_transfers() -> None:
    summary = summarise(
        load_result([record(0, 0.5, 0.7, 0.9, num_tokens=3), record(1, error="INTERNAL")]), (50.0, 99.0)
    )
    timings = generate_pb2.Timings(transfer=generate_pb2.Transfer(kv_bytes=2_000_000, transfer_s=0.004))
    assert cells_of(summary, [timings]) == [
        *("1", "1", "0.8"),  # 3 tokens in 4 s
        *("500.0", "500.0", "200.0", "200.0", "200.0", "200.0"),
        *("2.0", "4.0", "nan", "nan"),
    ]
