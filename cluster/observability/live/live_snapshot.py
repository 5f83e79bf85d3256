"""Makes snapshots of a cluster for those who watch it live: encoded once, whoever many watch, and bounded in size.

A snapshot has the engines, links and queues as they are now, the phases of requests in flight as far as they are known,
and the stories of the requests that have ended since the snapshot before it. The first snapshot of a viewer has those
of the last minute instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final, Protocol

import msgspec

from cluster.observability.live.bottleneck import Bottleneck, find_bottleneck
from cluster.observability.live.engine_totals import totals_of
from cluster.observability.live.live_rates import LiveCluster, LiveEngine, LiveLink, LiveRates
from cluster.observability.live.recent_figures import WINDOW_S, RecentFigures, RecentRequests
from cluster.observability.status import ClusterView, RequestView
from cluster.observability.stories.make_story import make_story, spans_of
from cluster.planning.plan_record import PlanRecord
from cluster.routing.request_record import RequestRecord

MAX_STORIES: Final = 256
"""The most stories of one snapshot, and of the first one MAX_KEPT_STORIES."""
MAX_KEPT_STORIES: Final = 600
MAX_STORY_BYTES: Final = 512 * 1024
"""The most bytes of the stories of one snapshot; of the first one twice as many."""
MAX_KEPT_STORY_BYTES: Final = 2 * MAX_STORY_BYTES
_MAX_RECORDS: Final = 2000
_MAX_ENGINES: Final = 128
_MAX_LINKS: Final = 256
MAX_IN_FLIGHT: Final = 64
"""The most requests in flight of one snapshot."""
_MAX_DECISIONS: Final = 20
_MAX_TEXT: Final = 300
_ARRIVED_AT_S: Final = attrgetter("arrived_at_s")


class RecordFeed(Protocol):
    """The records of requests that have ended."""

    def since(self, number: int, most: int) -> tuple[int, list[RequestRecord]]:
        """Return the newest records after an earlier call's number, oldest first, and the number for the next call."""
        ...


class LiveSpan(msgspec.Struct, frozen=True, array_like=True):
    """A phase of a request in flight, in seconds from its arrival. ended_s: None if it goes on"""

    phase: str
    began_s: float
    ended_s: float | None


class LiveRequest(msgspec.Struct, frozen=True):
    """A request in flight.

    arrived_at_s, phase: see RequestView
    engine: the one that decodes or will; "" if there is none yet
    spans:  its phases so far, in the order of their beginnings; none before an engine has got it
    """

    request_id: str
    tenant: str
    arrived_at_s: float
    phase: str
    engine: str
    spans: Sequence[LiveSpan]


class LiveDecision(msgspec.Struct, frozen=True):
    """A decision of the controller. at_s: Unix time"""

    at_s: float
    text: str


class LivePlan(msgspec.Struct, frozen=True):
    """The planner's newest decision. at_s: Unix time; steps: what has to be done"""

    at_s: float
    mode: str
    action: str
    steps: str
    reason: str


class LiveBottleneck(msgspec.Struct, frozen=True):
    """The cause that holds requests back; see Bottleneck."""

    kind: str
    num_requests: int
    where: Sequence[str]
    text: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment, as one ingress sees it.

    number:  counts the snapshots of this ingress, so that a viewer knows of those that it missed
    now_s:   Unix time
    stories: of requests that have ended, RequestStory as JSON, the oldest first
    num_*_left_out: what did not fit, of each kind: the oldest stories, the youngest requests in flight, engines and
             links at the end of their lists
    """

    number: int
    is_first: bool
    now_s: float
    model: str
    version: str
    ingress: str
    bottleneck: LiveBottleneck
    figures: RecentFigures
    engines: Sequence[LiveEngine]
    links: Sequence[LiveLink]
    in_flight: Sequence[LiveRequest]
    stories: Sequence[msgspec.Raw]
    decisions: Sequence[LiveDecision]
    plan: LivePlan | None
    controller_error: str
    update: str
    num_engines_left_out: int
    num_links_left_out: int
    num_in_flight_left_out: int
    num_stories_left_out: int


class SnapshotMaker:
    """Makes the snapshots of one ingress, one after the other."""

    def __init__(
        self,
        records: RecordFeed,
        live_records: Callable[[int], Iterable[RequestRecord]],
        *,
        ingress: str,
        version: str,
        now_s: float,
    ) -> None:
        """Begin with the requests that are kept.

        records:      of the ingress's requests that have ended
        live_records: returns the records of so many requests in flight, the oldest ones
        ingress:      its name; version: of raypd
        now_s:        Unix time
        """
        self._records = records
        self._live_records = live_records
        self._ingress, self._version = ingress, version
        self._rates = LiveRates()
        self._recent = RecentRequests(now_s)
        self._kept: deque[tuple[float, msgspec.Raw]] = deque(maxlen=MAX_KEPT_STORIES)
        self._last_record = 0
        self._number = 0
        self._newest: Snapshot | None = None

    def make(self, view: ClusterView) -> bytes:
        """Return the next snapshot as JSON. view: the cluster now"""
        live = self._rates.update(totals_of(view.engines))
        stories, num_left_out = self._new_stories(view.now_s)
        self._number += 1
        self._newest = self._snapshot(view, live, stories, num_left_out)
        return _ENCODER.encode(self._newest)

    def first(self) -> bytes:
        """Return the newest snapshot with the stories of the last minute, as JSON, for a viewer that has just come."""
        assert self._newest is not None, "make() comes first"
        stories, num_left_out = _within([raw for _, raw in self._kept], MAX_KEPT_STORY_BYTES)
        whole = msgspec.structs.replace(self._newest, is_first=True, stories=stories, num_stories_left_out=num_left_out)
        return _ENCODER.encode(whole)

    def _new_stories(self, now_s: float) -> tuple[list[msgspec.Raw], int]:
        """Return the stories of the requests that have ended since the last call, and how many were left out."""
        self._last_record, records = self._records.since(self._last_record, _MAX_RECORDS)
        new = [record for record in records if _ended_s(record) >= now_s - WINDOW_S]
        for record in new:
            self._recent.add(record)
        most = MAX_STORIES if self._number else MAX_KEPT_STORIES
        told = _told(new[-most:])
        self._kept.extend(told)
        while self._kept and self._kept[0][0] < now_s - WINDOW_S:
            self._kept.popleft()
        stories, _ = _within([raw for _, raw in told[-MAX_STORIES:]], MAX_STORY_BYTES)
        return stories, len(new) - len(stories)

    def _snapshot(
        self, view: ClusterView, live: LiveCluster, stories: Sequence[msgspec.Raw], num_left_out: int
    ) -> Snapshot:
        controller = view.controller
        engines = [_short_engine(one) for one in live.engines[:_MAX_ENGINES]]
        links = sorted(live.links, key=lambda link: -(link.bytes_per_s or 0.0))[:_MAX_LINKS]
        oldest = sorted(view.requests, key=_ARRIVED_AT_S)[:MAX_IN_FLIGHT]
        live_records = self._live_records(MAX_IN_FLIGHT) if oldest else ()
        spans = {(one.tenant, one.request_id): _live_spans(one) for one in live_records}
        in_flight = [_live_request(one, spans.get((one.tenant, one.request_id), ())) for one in oldest]
        return Snapshot(
            number=self._number,
            is_first=False,
            now_s=view.now_s,
            model=view.model,
            version=self._version,
            ingress=self._ingress,
            bottleneck=_bottleneck(find_bottleneck(live)),
            figures=self._recent.figures(view.now_s),
            engines=engines,
            links=[msgspec.structs.replace(link, last_error=link.last_error[:_MAX_TEXT]) for link in links],
            in_flight=in_flight,
            stories=stories,
            decisions=[LiveDecision(one.at_s, one.text[:_MAX_TEXT]) for one in controller.decisions[-_MAX_DECISIONS:]],
            plan=None if controller.plan is None else _plan(controller.plan),
            controller_error=controller.error[:_MAX_TEXT],
            update=controller.update[:_MAX_TEXT],
            num_engines_left_out=len(live.engines) - len(engines),
            num_links_left_out=len(live.links) - len(links),
            num_in_flight_left_out=len(view.requests) + view.num_requests_left_out - len(in_flight),
            num_stories_left_out=num_left_out,
        )


def _told(records: Sequence[RequestRecord]) -> list[tuple[float, msgspec.Raw]]:
    """Return the stories of the newest records, oldest first, each with the time of its end.

    No more are made than can be sent: those of requests with many attempts take long, and the event loop waits.
    """
    told, size_bytes = deque[tuple[float, msgspec.Raw]](), 0
    for record in reversed(records):
        story = make_story(record).to_json()
        size_bytes += len(story)
        if size_bytes > MAX_KEPT_STORY_BYTES:
            break
        told.appendleft((_ended_s(record), msgspec.Raw(story)))
    return list(told)


def _within(stories: Sequence[msgspec.Raw], max_bytes: int) -> tuple[list[msgspec.Raw], int]:
    """Return the newest stories that fit, oldest first, and how many do not."""
    size_bytes, kept = 0, 0
    for story in reversed(stories):
        size_bytes += memoryview(story).nbytes
        if size_bytes > max_bytes:
            break
        kept += 1
    return list(stories[len(stories) - kept :]), len(stories) - kept


def _live_request(view: RequestView, spans: Sequence[LiveSpan]) -> LiveRequest:
    return LiveRequest(view.request_id, view.tenant, view.arrived_at_s, view.phase, view.decode_engine, spans)


def _live_spans(record: RequestRecord) -> list[LiveSpan]:
    return [LiveSpan(one.phase, one.began_s, one.ended_s) for one in spans_of(record)]


def _ended_s(record: RequestRecord) -> float:
    return record.arrived_at_s + (record.duration_s or 0.0)


def _short_engine(engine: LiveEngine) -> LiveEngine:
    if len(engine.last_error) <= _MAX_TEXT:
        return engine
    return msgspec.structs.replace(engine, last_error=engine.last_error[:_MAX_TEXT])


def _bottleneck(found: Bottleneck) -> LiveBottleneck:
    return LiveBottleneck(found.kind.value, found.num_requests, found.where, found.text)


def _plan(plan: PlanRecord) -> LivePlan:
    return LivePlan(plan.at_s, plan.mode.value, plan.action.value, plan.steps[:_MAX_TEXT], plan.reason[:_MAX_TEXT])


_ENCODER = msgspec.json.Encoder()
