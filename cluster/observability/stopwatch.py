"""Measures the times of a request's tokens as they leave Serving, and adds them to the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cluster.observability.metrics import ServingMetrics, outcome_of
from cluster.observability.prometheus.request_figures import ModelFigures
from cluster.parameters.generation import GenerateEnd
from cluster.routing.request_record import RequestRecord

_MAX_GAPS: Final = 128


class Stopwatch:
    """Measures the times of one request, from the moment that the stopwatch is made.

    outcome:    how the request has ended, as in raypd_requests; None while it is in flight
    duration_s: seconds from the request's arrival to its end; None before
    """

    def __init__(self, clock: Callable[[], float], metrics: ServingMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._figures = metrics.base
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._num_tokens = 0
        self._gaps = _Gaps()
        self._finish = ""
        self._adapter = ""
        self.outcome: str | None = None
        self.duration_s: float | None = None

    @property
    def in_flight_s(self) -> float | None:
        """Seconds from the request's arrival until now; None once it has ended."""
        return None if self.duration_s is not None else self._clock() - self._started_s

    @property
    def num_tokens(self) -> int:
        """Return how many tokens have come so far."""
        return self._num_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before the first token."""
        return None if self._first_token_s is None else self._first_token_s - self._started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between output tokens, in seconds; None before the second token."""
        if self._first_token_s is None or self._num_tokens < 2:
            return None
        return (self._last_token_s - self._first_token_s) / (self._num_tokens - 1)

    @property
    def itl_p50_s(self) -> float | None:
        """Median time between output tokens, in seconds; None before the second token."""
        return self._gaps.median_s

    @property
    def itl_max_s(self) -> float | None:
        """Longest time between output tokens, in seconds; None before the second token."""
        return self._gaps.longest_s

    def count_for(self, figures: ModelFigures) -> None:
        """Count the request from now on for another model than the base model. figures: of the other model"""
        self._figures = figures

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count the request as one in flight until the context is left."""
        counts = self._metrics.in_flight
        counts.add(self._adapter, has_tokens=False)
        try:
            yield
        finally:
            counts.remove(self._adapter, has_tokens=self._num_tokens > 0)

    def need(self, adapter: str) -> None:
        """Note the adapter that the request needs, once it is known. The request is in flight."""
        counts, has_tokens = self._metrics.in_flight, self._num_tokens > 0
        counts.remove(self._adapter, has_tokens=has_tokens)
        counts.add(adapter, has_tokens=has_tokens)
        self._adapter = adapter
        self.count_for(self._metrics.of_adapter(adapter))

    def count(self, num_tokens: int) -> None:
        """Note that this many tokens have come now."""
        if num_tokens == 0:
            return
        now_s = self._clock()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._metrics.in_flight.remove(self._adapter, has_tokens=False)
            self._metrics.in_flight.add(self._adapter, has_tokens=True)
            self._figures.on_first_tokens(num_tokens, now_s - self._started_s)
        else:
            gap_s = now_s - self._last_token_s
            self._figures.on_next_tokens(num_tokens, gap_s)
            self._gaps.add(gap_s / num_tokens)
        self._last_token_s = now_s
        self._num_tokens += num_tokens

    def end(self, end: GenerateEnd) -> None:
        """Note how the request has ended, and count its prompt."""
        self._finish = end.finish_reason.name.lower()
        self._figures.on_prompt(end.usage.num_prompt_tokens, end.usage.num_cached_tokens)

    def count_record(self, record: RequestRecord) -> None:
        """Count the phases and the attempts of the request, which has ended. record: its record"""
        self._figures.on_record(record, self.tpot_s)
        self._metrics.on_record(record)

    def show_trace(self, record: RequestRecord, trace_id: str) -> None:
        """Let histograms show the request's trace as an example. record: as count_record() got it"""
        self._figures.show_trace(record, self.tpot_s, trace_id)
        self._metrics.has_traces = True

    @contextmanager
    def counting_the_end(self) -> Iterator[None]:
        """Count the request's end and its duration when the context is left.

        The outcome is the one that end() was given, or else the error with which the context is left, or else "done".
        """
        outcome = "done"
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            self._metrics.on_error(error)
            raise
        finally:
            self.outcome, self.duration_s = self._finish or outcome, self._clock() - self._started_s
            self._figures.on_end(self.outcome, self.duration_s)


class _Gaps:
    """The times between tokens: the longest one, and every k-th one for the median, _MAX_GAPS at most."""

    def __init__(self) -> None:
        self._sample: list[float] = []
        self._every = self._num_until_next = 1
        self.longest_s: float | None = None

    def add(self, gap_s: float) -> None:
        if self.longest_s is None or gap_s > self.longest_s:
            self.longest_s = gap_s
        self._num_until_next -= 1
        if self._num_until_next:
            return
        self._sample.append(gap_s)
        if len(self._sample) == _MAX_GAPS:
            del self._sample[1::2]
            self._every *= 2
        self._num_until_next = self._every

    @property
    def median_s(self) -> float | None:
        return sorted(self._sample)[len(self._sample) // 2] if self._sample else None
