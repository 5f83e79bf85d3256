"""The records of a run's requests, which are bounded so that long runs fit into memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cluster.bench.arrivals import PlannedRequest

MAX_GAPS: Final = 4_000_000
"""The most gaps between events that a run keeps, 8 bytes each."""


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are the client's clock, in seconds.

    due_s:             when the request had to be sent: its arrival, or later when --max-concurrency held it back
    sent_s:            when it was sent; first_s, last_s: when its first and its last event with a token came
    gaps_s:            the times between these events; None if the run was too long to keep those of this request
    num_input_tokens, num_output_tokens: what the server counted (usage); None if it sent no usage
    error:             the kind of failure, such as "HTTP 429"; None if the answer is whole
    detail:            the message of the server or of the system
    """

    request: PlannedRequest
    arrival_s: float
    due_s: float = 0.0
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    num_events: int = 0
    longest_gap_s: float = 0.0
    gaps_s: array[float] | None = field(default_factory=lambda: array("d"))
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    def note_event(self, now_s: float) -> None:
        """Take an event with a token, or with several."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            gap_s = now_s - self.last_s
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
            if self.gaps_s is not None:
                self.gaps_s.append(gap_s)
        self.last_s = now_s
        self.num_events += 1

    @property
    def is_complete(self) -> bool:
        """Whether the answer came whole, with at least one token."""
        return self.error is None and self.first_s is not None

    @property
    def num_tokens(self) -> int:
        """The output tokens: what the server counted; else the events, as if each had one token."""
        return self.num_events if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        """From sending to the first event. Only of a complete request."""
        assert self.first_s is not None, "a complete request has a first event"
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last event."""
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """The time per output token after the first one; None of a request with a single token."""
        if self.num_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def lateness_s(self) -> float:
        """How much later than due the generator sent the request."""
        return self.sent_s - self.due_s

    @property
    def queue_s(self) -> float:
        """How long --max-concurrency held the request back."""
        return self.due_s - self.arrival_s


class Records:
    """The records of a run, in the order of their ends.

    Invariant: at most MAX_GAPS gaps (times between events) are kept. If there are more, the gaps of a random half of
    the requests are dropped, and the gaps of later requests are dropped with the same probability. So the gaps that
    are kept are all gaps of a random sample of the requests.
    """

    def __init__(self, seed: int, max_gaps: int = MAX_GAPS) -> None:
        """Begin without records. seed: draws the requests whose gaps are kept"""
        self._records: list[RequestRecord] = []
        self._rng = random.Random(f"{seed} gaps")
        self._max_gaps = max_gaps
        self._num_gaps = 0
        self.kept_share = 1.0

    def add(self, record: RequestRecord) -> None:
        """Take the record of a request that has ended."""
        self._records.append(record)
        if record.gaps_s is None or self._rng.random() >= self.kept_share:
            record.gaps_s = None
            return
        self._num_gaps += len(record.gaps_s)
        while self._num_gaps > self._max_gaps and self.kept_share > 1e-9:
            self._drop_half()

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def _drop_half(self) -> None:
        self.kept_share /= 2
        for record in self._records:
            if record.gaps_s is not None and self._rng.random() < 0.5:
                self._num_gaps -= len(record.gaps_s)
                record.gaps_s = None
