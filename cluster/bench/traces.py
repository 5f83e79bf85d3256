"""Plans the requests of a trace, of any form that cluster.traces reads."""

from __future__ import annotations

from pathlib import Path

from cluster.bench.arrivals import PlannedRequest
from cluster.traces.trace_reader import open_trace


def read_trace(
    path: Path, num_requests: int | None = None, speed: float = 1.0, *, seed: int = 0
) -> list[PlannedRequest]:
    """Plan the first requests of a trace, in the order of their arrival; the first one arrives at 0.

    num_requests: how many to plan; None: all
    speed:        replay the trace this many times as fast as it was recorded
    seed:         draws arrivals within the bins in which they were recorded, if they were
    Raises InvalidConfig, which names the line, if the file cannot be read or has a mistake in any line.
    """
    return [
        PlannedRequest(
            index, request.arrival_s / speed, request.num_input_tokens, request.num_output_tokens, request.blocks
        )
        for index, request in enumerate(open_trace(path).requests(seed, num_requests))
    ]
