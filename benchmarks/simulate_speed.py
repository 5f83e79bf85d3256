"""Measure how fast the simulator is: requests per second of processor time, and the memory that they take.

The requests have the shape of a trace (lengths, block hashes, arrivals): copies of it, each with hashes of its own,
begin at random moments and are replayed at once, so fast that the engines are busy. The engines are of about the speed
of an 8B model on an H100; four of ten prefer prefill, and the others prefer to decode.

    python -m benchmarks.simulate_speed --trace conversation_trace.jsonl
"""

from __future__ import annotations

import heapq
import random
import resource
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from cluster.bench.arrivals import PlannedRequest
from cluster.bench.traces import read_trace
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.simulation_result import Outcome
from cluster.simulation.simulator import simulate
from cluster.simulation.timing.step_times import ModelStepTimes
from cluster.simulation.workloads.workload_request import WorkloadRequest
from kv_transfer.config import KVTransferConfig

_COSTS: Final = StepCostModel((6e-3, 5e-6, 0.0, 0.0, 4.5e-5, 0.0, 1e-5, 4e-8, 1e-3, 1e-8, 5e-10))
_NUM_BLOCKS: Final = 820
_KV_BYTES_PER_TOKEN: Final = 131_072


def main(
    trace: Annotated[Path, typer.Option(help="Trace of requests, in Mooncake's form.")],
    requests: Annotated[list[int], typer.Option(help="Requests of a run; several runs.")] = [10_000, 100_000],  # noqa: B006
    engines: Annotated[int, typer.Option(min=2, help="Engines of the cluster.")] = 1000,
    per_engine: Annotated[float, typer.Option(help="Requests per second and engine.")] = 1.0,
    mode: Annotated[RoutingMode, typer.Option(help="Routing mode.")] = RoutingMode.COST,
) -> None:
    """Print the requests per second of processor time for each number of requests."""
    rows = read_trace(trace)
    table = Table("requests", "CPU s", "requests / CPU s", "us a request", "simulated s", "complete", "peak GiB")
    for num_requests in requests:
        begin_s = time.process_time()
        workload = like_trace(rows, num_requests, engines * per_engine)
        result = simulate(cluster_of(engines, mode), workload, seed=1)
        cpu_s = time.process_time() - begin_s
        num_complete = sum(found.outcome is Outcome.COMPLETE for found in result.requests)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        figures = (f"{num_requests / cpu_s:.0f}", f"{cpu_s / num_requests * 1e6:.0f}", f"{result.duration_s:.0f}")
        table.add_row(str(num_requests), f"{cpu_s:.1f}", *figures, str(num_complete), f"{peak_gib:.2f}")
    Console().print(table)


def cluster_of(num_engines: int, mode: RoutingMode) -> ClusterSpec:
    """Return a cluster whose engines are of two roles."""
    times = ModelStepTimes(_COSTS)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    num_prefill = num_engines * 4 // 10
    roles = [EngineRole.PREFILL] * num_prefill + [EngineRole.DECODE] * (num_engines - num_prefill)
    return ClusterSpec(
        tuple(EngineSpec(f"{role}-{n}", role, times, _NUM_BLOCKS, config) for n, role in enumerate(roles)),
        LinkSpec(bytes_per_s=5e10, latency_s=1e-4),
        kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
        routing_mode=mode,
        slo=Slo(ttft_s=5.0, itl_s=0.1),
        ingress=IngressConfig(max_requests_in_flight=1_000_000, max_waiting_tokens=1 << 50),
        # All that a step has computed is one chunk.
        kv_transfer=KVTransferConfig(max_chunk_bytes=1 << 40),
    )


def like_trace(rows: list[PlannedRequest], num_requests: int, per_s: float) -> Iterator[WorkloadRequest]:
    """Yield requests of a trace's shape, at so many per second."""
    duration_s = rows[-1].arrival_s * len(rows) / max(len(rows) - 1, 1)
    num_copies = -(-num_requests // len(rows))
    speed = per_s / (num_copies * len(rows) / duration_s)
    highest = max(max(row.blocks, default=0) for row in rows) + 1
    copies = [_copy(rows, number, duration_s, speed, number * highest) for number in range(num_copies)]
    return islice(heapq.merge(*copies, key=lambda request: request.arrival_s), num_requests)


def _copy(
    rows: list[PlannedRequest], number: int, duration_s: float, speed: float, first_hash: int
) -> Iterator[WorkloadRequest]:
    first = random.Random(number).randrange(len(rows))
    for index, row in enumerate(rows[first:] + rows[:first]):
        yield WorkloadRequest(
            f"{number}-{index}",
            (row.arrival_s - rows[first].arrival_s) % duration_s / speed,
            row.num_input_tokens,
            row.num_output_tokens,
            tuple(first_hash + block for block in row.blocks),
        )


if __name__ == "__main__":
    typer.run(main)
