"""Offers the requests of a trace, faster or slower than they were recorded."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.simulation.workloads.workload_request import WorkloadRequest
from cluster.traces.trace_reader import Trace


def trace_requests(
    trace: Trace, *, seed: int = 0, rate_scale: float = 1.0, num_requests: int | None = None
) -> Iterator[WorkloadRequest]:
    """Yield the requests of a trace in the order of arrival.

    seed:         draws arrivals within the bins in which they were recorded, if they were
    rate_scale:   the requests come this many times as fast as they were recorded
    num_requests: how many to yield; None: all
    Raises InvalidConfig if the file was changed since the trace was opened.
    """
    for request in trace.requests(seed, num_requests):
        yield WorkloadRequest(
            request.request_id,
            request.arrival_s / rate_scale,
            request.num_input_tokens,
            request.num_output_tokens,
            request.blocks,
            request.tenant,
            request.ttft_s,
            request.itl_s,
        )
