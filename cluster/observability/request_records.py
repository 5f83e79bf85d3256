"""The records of one ingress: what is written when a request ends, and how a request's record is found again."""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from cluster.errors import AllowanceSpent, DeadlineUnreachable, FieldViolation, InvalidRequest, Overloaded
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.routing_figures import RoutingFigures, RoutingSummary
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.trace_writing.request_tracer import RequestTracer
from cluster.planning.offered_load import OfferedLoad, OfferedRequest
from cluster.routing.request_record import EngineQueue, RequestRecord

MAX_FOUND: Final = 32
"""The most records that one search returns."""
MAX_FOUND_BYTES: Final = 256 * 1024
"""The most bytes of all records that one search returns."""
MAX_LAST: Final = 500
"""The most records that a search for the last requests returns."""
MAX_LAST_BYTES: Final = 2 << 20
"""The most bytes of all records that a search for the last requests returns."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Asks for the records of one request, and of its samples if it has any; or for those of the last requests.

    request_id: the whole id, or the beginning of one if no request has exactly this id; before it may stand its tenant
                and a slash, as `raypd top` prints ids; "" for the last requests
    tenant:     whose requests they are; None: anybody's, which only operators may ask for
    last:       how many of the last requests, those in flight included; 0 if one request is asked for
    """

    request_id: str
    tenant: str | None
    last: int = 0

    def readings(self) -> Iterator[RecordQuery]:
        """Yield the query with its id as it is, and then as a tenant, a slash and an id, if it can be read so."""
        yield self
        tenant, _, request_id = self.request_id.partition("/")
        if request_id and self.tenant in (None, tenant):
            yield RecordQuery(request_id, tenant)

    def names(self, tenant: str, request_id: str) -> bool:
        """Whether this request is asked for."""
        return request_id == self.request_id and self.tenant in (None, tenant)

    def names_sample(self, tenant: str, request_id: str) -> bool:
        """Whether this request is a sample of the one that is asked for: its id goes on with two indices."""
        if self.tenant not in (None, tenant) or not request_id.startswith(f"{self.request_id}."):
            return False
        indices = request_id[len(self.request_id) + 1 :].split(".")
        return len(indices) == 2 and all(index.isdecimal() for index in indices)

    def names_beginning(self, tenant: str, request_id: str) -> bool:
        """Whether this request's id begins with the one that is asked for."""
        return self.tenant in (None, tenant) and request_id.startswith(self.request_id)


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
        self.queues: Callable[[], Mapping[str, EngineQueue]] = dict
        """Returns the queues of engines by their newest reports, for the records of requests in flight."""
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
                    stopwatch.count_record(record)
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
        if query.last:
            return self._last(query, in_flight)
        live = [one for one in in_flight if one[0].has_attempts]
        for asked in query.readings():
            for is_asked_for in (asked.names, asked.names_sample, asked.names_beginning):
                if found := self._matching(is_asked_for, live):
                    return list(_within(found[:MAX_FOUND], MAX_FOUND_BYTES))
        return []

    def since(self, number: int, most: int) -> tuple[int, list[RequestRecord]]:
        """Return the records of requests that have ended since an earlier call, the oldest first.

        number: the number that the earlier call returned; 0: all records that are kept
        most:   the most records to return; the newest ones are
        Returns the number for the next call, and the records.
        """
        new: list[RequestRecord] = []
        newest = number
        for kept in itertools.islice(self._store.newest(), most):
            if kept.number <= number:
                break
            newest = max(newest, kept.number)
            new.append(RequestRecord.from_bytes(kept.data))
        return newest, new[::-1]

    def live(self, in_flight: Iterable[RecordWriter]) -> list[RequestRecord]:
        """Return the records of requests in flight that engines have got, as they are now, without times of tokens."""
        return [writer.outline(self._ingress) for writer in in_flight if writer.has_attempts]

    def _live(self, in_flight: Sequence[tuple[RecordWriter, Stopwatch]]) -> Iterator[bytes]:
        """Yield the records of requests in flight, with the queues that they may wait in."""
        queues = self.queues() if in_flight else {}
        for writer, stopwatch in in_flight:
            record = writer.record(self._ingress, stopwatch)
            silent = record.attempts[-1].silent_engine_ids if record.attempts else ()
            found = tuple(queues[name] for name in silent if name in queues)
            yield (msgspec.structs.replace(record, queues=found) if found else record).to_bytes()

    def _last(self, query: RecordQuery, in_flight: Iterable[tuple[RecordWriter, Stopwatch]]) -> list[bytes]:
        """Return the records of the last requests, the newest first: those in flight, then those that have ended."""
        asked_for = [one for one in in_flight if one[0].has_attempts and query.tenant in (None, one[0].tenant)]
        # Of thousands in flight no more are described than are returned.
        live = self._live(asked_for[::-1])
        ended = (kept.data for kept in self._store.newest() if query.tenant in (None, kept.tenant))
        found = itertools.islice(itertools.chain(live, ended), min(query.last, MAX_LAST))
        return list(_within(found, MAX_LAST_BYTES))

    def _matching(
        self, is_asked_for: Callable[[str, str], bool], live: list[tuple[RecordWriter, Stopwatch]]
    ) -> list[bytes]:
        found = {
            (kept.tenant, kept.request_id): kept.data
            for kept in self._store.items()
            if is_asked_for(kept.tenant, kept.request_id)
        }
        asked_for = [one for one in live if is_asked_for(one[0].tenant, one[0].request_id)]
        for (writer, _), data in zip(asked_for, self._live(asked_for), strict=True):
            # A request may reuse the id of one that has ended.
            found[writer.tenant, writer.request_id] = data
        return list(found.values())


def of_one_request(found: Sequence[RequestRecord], query: RecordQuery) -> list[RequestRecord]:
    """Return those records that are of the one request that a query asks for.

    found: of all ingresses; one that has no request of exactly this id has sent those that begin so
    Raises InvalidRequest if no request has exactly this id, and several begin with it.
    """
    for asked in query.readings():
        for is_asked_for in (asked.names, asked.names_sample):
            if exact := [one for one in found if is_asked_for(one.tenant, one.request_id)]:
                return exact
    number = len({_whole_id(one.request_id) for one in found})
    if number < 2:
        return list(found)
    begin_so = f"{'at least ' if len(found) >= MAX_FOUND else ''}{number} requests begin with this"
    allowed = f"a whole id, or as much of its beginning as no other request has: {begin_so}"
    raise InvalidRequest(FieldViolation("request_id", reprlib.repr(query.request_id), allowed))


def _whole_id(request_id: str) -> str:
    """Return the id of the call that a request belongs to: without the indices of prompt and sample, if it has them."""
    name, *indices = request_id.rsplit(".", 2)
    is_sample = name and len(indices) == 2 and all(index.isdecimal() for index in indices)
    return name if is_sample else request_id


def _within(found: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    size_bytes = 0
    for data in found:
        size_bytes += len(data)
        if size_bytes > max_bytes:
            return
        yield data
