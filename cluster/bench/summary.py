"""The figures of a run, and their definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.bench.estimates import Distribution, distribution_of, percentile
from cluster.bench.load import LoadResult
from cluster.bench.objectives import num_good
from cluster.bench.record import RequestRecord

DEFINITIONS: Final = {
    "ttft": "Time to first token: from sending a request, the opening of a connection included, to its first event "
    "with a token.",
    "tpot": "Time per output token after the first one, a figure of each request: (last event - first event) / "
    "(output tokens - 1).",
    "itl": "Inter-token latency: each time between two events of a request. An event may have several tokens.",
    "e2el": "End-to-end latency: from sending a request to its last event with a token.",
    "client_queue_time": "Client queue time: how long --max-concurrency held a request back; no part of the others.",
}
"""The definitions of the metrics, by vLLM's names; they are vLLM's metrics."""
LATE_S: Final = 0.010
"""A send, or the event loop, that is later than this is late."""
_LATE_PERCENT: Final = 99


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that failed in one way. example: the first one's message"""

    num_requests: int
    example: str


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met the objectives. objectives_s: seconds by metric"""

    objectives_s: Mapping[str, float]
    num_good: int
    per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Generator:
    """How late the load generator was. All in seconds, except cpu_share, which is processor time / duration."""

    lateness_p50_s: float
    lateness_p99_s: float
    lateness_max_s: float
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float
    cpu_per_token_s: float

    @property
    def is_late(self) -> bool:
        """Whether the generator itself was so slow that the figures do not describe the server."""
        return max(self.lateness_p99_s, self.lag_p99_s) > LATE_S


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; times in seconds. They are over the complete requests, but for `failures`.

    metrics:           by the names of DEFINITIONS
    tokens_per_event:  1 if every event has one token; NaN if the server did not count tokens
    num_uncounted:     complete requests whose tokens the server did not count: their events were counted instead
    num_other_lengths: complete requests with another number of output tokens than was asked for
    itl_share:         the share of the requests whose gaps were kept: 1, but for very long runs
    """

    duration_s: float
    num_completed: int
    failures: Mapping[str, Failure]
    num_input_tokens: int
    num_output_tokens: int
    metrics: Mapping[str, Distribution]
    goodput: Goodput | None
    tokens_per_event: float
    num_uncounted: int
    num_other_lengths: int
    peak_concurrency: int
    generator: Generator
    itl_share: float

    @property
    def num_failed(self) -> int:
        """How many requests failed, in whatever way."""
        return sum(failure.num_requests for failure in self.failures.values())

    @property
    def requests_per_s(self) -> float:
        """Complete requests per second of the whole run."""
        return self.num_completed / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of complete requests per second of the whole run."""
        return self.num_output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        """Input and output tokens of complete requests per second of the whole run."""
        return (self.num_input_tokens + self.num_output_tokens) / self.duration_s


def summarise(
    result: LoadResult, percents: Sequence[float], objectives_s: Mapping[str, float] | None = None, seed: int = 0
) -> Summary:
    """Compute the figures of a run. percents: the percentiles; seed: of the intervals' resamples"""
    records = sorted(result.records, key=lambda record: record.request.index)
    complete = [record for record in records if record.is_complete]
    counted = [record for record in complete if record.num_output_tokens is not None]
    num_events = sum(record.num_events for record in counted)
    values: dict[str, list[Sequence[float]]] = {
        "ttft": [[record.ttft_s] for record in complete],
        "tpot": [[] if record.tpot_s is None else [record.tpot_s] for record in complete],
        "itl": [record.gaps_s for record in complete if record.gaps_s is not None],
        "e2el": [[record.e2e_s] for record in complete],
    }
    if any(record.queue_s for record in complete):
        values["client_queue_time"] = [[record.queue_s] for record in complete]
    num_output_tokens = sum(record.num_tokens for record in complete)
    return Summary(
        duration_s=result.duration_s,
        num_completed=len(complete),
        failures=_failures(records),
        num_input_tokens=sum(record.num_input_tokens or record.request.num_input_tokens for record in complete),
        num_output_tokens=num_output_tokens,
        metrics={name: distribution_of(given, percents, seed) for name, given in values.items()},
        goodput=_goodput(complete, objectives_s, result.duration_s, len(records)) if objectives_s else None,
        tokens_per_event=sum(record.num_tokens for record in counted) / num_events if num_events else math.nan,
        num_uncounted=len(complete) - len(counted),
        num_other_lengths=sum(record.num_tokens != record.request.num_output_tokens for record in counted),
        peak_concurrency=result.peak_concurrency,
        generator=_generator(result, records, num_output_tokens),
        itl_share=result.records.kept_share,
    )


def _failures(records: Sequence[RequestRecord]) -> dict[str, Failure]:
    failed = [record for record in records if not record.is_complete]
    counts = Counter(record.error or "no token" for record in failed)
    examples = {record.error or "no token": record.detail for record in reversed(failed)}
    return {kind: Failure(count, examples[kind]) for kind, count in counts.most_common()}


def _goodput(
    complete: Sequence[RequestRecord], objectives_s: Mapping[str, float], duration_s: float, num_requests: int
) -> Goodput:
    good = num_good(complete, objectives_s)
    return Goodput(objectives_s, good, good / duration_s, good / num_requests)


def _generator(result: LoadResult, records: Sequence[RequestRecord], num_tokens: int) -> Generator:
    late_s = [record.lateness_s for record in records]
    lag_s = result.lag_s
    return Generator(
        lateness_p50_s=percentile(late_s, 50),
        lateness_p99_s=percentile(late_s, _LATE_PERCENT),
        lateness_max_s=max(late_s, default=math.nan),
        lag_p99_s=percentile(lag_s, _LATE_PERCENT) if lag_s else 0.0,
        lag_max_s=max(lag_s, default=0.0),
        cpu_share=result.cpu_s / result.duration_s,
        cpu_per_token_s=result.cpu_s / num_tokens if num_tokens else math.nan,
    )
