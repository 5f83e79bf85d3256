"""The records of one ingress: what is written when a request ends, and how a request's record is found again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cluster.errors import AllowanceSpent, DeadlineUnreachable, Overloaded
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.routing_figures import RoutingFigures, RoutingSummary
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.trace_writing.request_tracer import RequestTracer
from cluster.planning.offered_load import OfferedLoad, OfferedRequest
from cluster.routing.request_record import RequestRecord

MAX_FOUND: Final = 32
"""The most records that one search returns."""
MAX_FOUND_BYTES: Final = 256 * 1024
"""The most bytes of all records that one search returns."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Asks for the records of one request, and of its samples if it has any.

    tenant: whose request it is; None: anybody's, which only operators may ask for
    """

    request_id: str
    tenant: str | None

    def names(self, tenant: str, request_id: str) -> bool:
        """Whether this request is asked for."""
        return request_id == self.request_id and self.tenant in (None, tenant)

    def names_sample(self, tenant: str, request_id: str) -> bool:
        """Whether this request is a sample of the one that is asked for: its id goes on with two indices."""
        if self.tenant not in (None, tenant) or not request_id.startswith(f"{self.request_id}."):
            return False
        indices = request_id[len(self.request_id) + 1 :].split(".")
        return len(indices) == 2 and all(index.isdecimal() for index in indices)


@dataclass(frozen=True, slots=True)
class UnansweredIngress:
    """An ingress that was asked for records and did not answer. reason: why, in words"""

    ingress: str
    reason: str

    def __str__(self) -> str:
        return f"{self.ingress} ({self.reason})"


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """The answer of several ingresses. records: as RequestRecord.to_bytes()"""

    records: tuple[bytes, ...] = ()
    unanswered: tuple[UnansweredIngress, ...] = ()


class RequestRecords:
    """The records of the requests of one ingress, those in flight and the last ones that have ended."""

    def __init__(
        self,
        ingress: str,
        store: RecordStore,
        clock: Callable[[], float] = time.monotonic,
        *,
        tracer: RequestTracer | None = None,
        offered: OfferedLoad | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without records.

        ingress:    its name, which is in every record
        clock:      monotonic seconds, for the window of the figures
        tracer:     writes the request trace; None: there is none
        offered:    gets what was offered, for the planner; None if there is no planner
        wall_clock: Unix time in seconds, for the windows of the offered load
        """
        self._tracer = tracer
        self.offered = offered
        self._wall_clock = wall_clock
        self._ingress = ingress
        self._store = store
        self._figures = RoutingFigures()
        self._clock = clock

    @property
    def is_off(self) -> bool:
        """Whether no records are kept; the figures are summed up all the same."""
        return self._store.is_off

    @contextmanager
    def kept(self, writer: RecordWriter, stopwatch: Stopwatch, *, is_traced: bool = True) -> Iterator[None]:
        """Keep the request's record when the context is left. A request that no engine got leaves none.

        is_traced: whether the request belongs into the request trace, where one that no engine got has a line, too
        """
        try:
            yield
        except (Overloaded, DeadlineUnreachable) as refusal:
            # A client at its own limit would be refused by a larger cluster as well.
            if self.offered is not None and not isinstance(refusal, AllowanceSpent) and not stopwatch.num_tokens:
                self._note_refusal(self.offered, writer)
            raise
        finally:
            is_traced = is_traced and self._tracer is not None
            if writer.has_attempts or is_traced:
                record = writer.record(self._ingress, stopwatch)
                if writer.has_attempts:
                    self._figures.add(record, self._clock())
                    self._store.put(record)
                    self._note_end(record)
                if is_traced and self._tracer is not None:
                    self._tracer.put(record, writer.arrived_s, writer.request)

    def size(self, writer: RecordWriter, num_prompt_tokens: int) -> None:
        """Note the length of a request's prompt, which is valid, before the request is admitted or refused."""
        if self.offered is not None and not writer.num_prompt_tokens:
            self.offered.arrive(self._wall_clock(), num_prompt_tokens)
        writer.num_prompt_tokens = num_prompt_tokens

    def summary(self) -> RoutingSummary:
        """Sum up how this ingress has routed; may be called from any thread."""
        return self._figures.summary(self._clock())

    def _note_refusal(self, offered: OfferedLoad, writer: RecordWriter) -> None:
        now_s = self._wall_clock()
        if not writer.num_prompt_tokens:
            offered.arrive(now_s)
        offered.refuse(now_s)

    def _note_end(self, record: RequestRecord) -> None:
        if self.offered is None or not record.num_output_tokens:
            return
        computing = record.attempts[-1].computing
        num_cached = 0 if computing is None else min(computing.num_cached_tokens, record.num_prompt_tokens)
        ended = OfferedRequest(record.arrived_at_s, record.num_prompt_tokens, num_cached, record.num_output_tokens)
        self.offered.end(ended, self._wall_clock())

    def find(self, query: RecordQuery, in_flight: Iterable[tuple[RecordWriter, Stopwatch]]) -> list[bytes]:
        """Return the records that a query asks for, the oldest first.

        in_flight: the requests in flight
        Returns MAX_FOUND records of MAX_FOUND_BYTES in all at most; the newest ones are left out.
        """
        if self.is_off:
            return []
        live = [one for one in in_flight if one[0].has_attempts]
        return list(_within_limits(self._matching(query.names, live) or self._matching(query.names_sample, live)))

    def _matching(
        self, is_asked_for: Callable[[str, str], bool], live: list[tuple[RecordWriter, Stopwatch]]
    ) -> list[bytes]:
        found = {
            (tenant, request_id): data
            for tenant, request_id, data in self._store.items()
            if is_asked_for(tenant, request_id)
        }
        for writer, stopwatch in live:
            if is_asked_for(writer.tenant, writer.request_id):
                # A request may reuse the id of one that has ended.
                found[writer.tenant, writer.request_id] = writer.record(self._ingress, stopwatch).to_bytes()
        return list(found.values())


def _within_limits(found: list[bytes]) -> Iterator[bytes]:
    size_bytes = 0
    for data in found[:MAX_FOUND]:
        size_bytes += len(data)
        if size_bytes > MAX_FOUND_BYTES:
            return
        yield data
