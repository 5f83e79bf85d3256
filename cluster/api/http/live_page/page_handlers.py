"""The handlers of the live page: its files, and for operators its stream of snapshots and a trace of requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Final

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from cluster.access.access_control import AccessControl
from cluster.access.caller import current_caller
from cluster.api.http.app import Call, Endpoint, Guards, Handler, ServerState, make_app
from cluster.api.http.live_page.live_feed import LiveFeed
from cluster.api.http.live_page.page_files import EVENTS_PATH, HEADERS, REQUEST_PATH, TRACE_PATH, PageFile, page_files
from cluster.api.http.open_streams import OpenStreams
from cluster.api.http.receiving.hosts import AllowedHosts
from cluster.api.http.streams import EventStream
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.errors import FieldViolation, InvalidRequest, PermissionDenied, RecordNotFound
from cluster.observability.request_records import RecordQuery, of_one_request
from cluster.observability.stories.chrome_trace import chrome_trace
from cluster.observability.stories.make_story import make_story
from cluster.routing.request_record import RequestRecord
from cluster.settings.http import HttpConfig

_NUM_TRACED: Final = 200
"""The requests of a trace."""


class LivePage:
    """The live page of one server."""

    def __init__(
        self,
        feed: LiveFeed,
        streams: OpenStreams,
        find_records: Callable[[RecordQuery], list[bytes]],
        why_off: str = "",
    ) -> None:
        """Keep what the page shows.

        feed:         the snapshots
        streams:      the server's streams
        find_records: returns this ingress's records, as RequestRecord.to_bytes()
        why_off:      why nobody gets the page; "": it is on
        """
        self._feed = feed
        self._streams = streams
        self._find_records = find_records
        self._why_off = why_off

    def routes(self, state: ServerState) -> Iterator[Route]:
        """Yield the routes of the page. state: of the server that answers them"""
        handlers = {path: self._file_handler(file) for path, file in page_files().items()}
        own: dict[str, Handler] = {EVENTS_PATH: self.events, REQUEST_PATH: self.request, TRACE_PATH: self.trace}
        for path, handler in (handlers | own).items():
            yield Route(path, Endpoint(handler, state, is_work=False), methods=["GET"])

    async def events(self, call: Call) -> Response:
        """Answer with the stream of snapshots. Raises PermissionDenied, Overloaded."""
        del call
        self._check_on()
        current_caller().check_administers()
        self._feed.check_room()
        return EventStream(f"ui-{uuid.uuid4().hex}", MappingProxyType({}), self._feed.watch(), self._streams)

    async def request(self, call: Call) -> Response:
        """Answer with the stories of one of this ingress's requests, in flight or ended, and of its samples.

        The query has its id, or the beginning of it, and the tenant if only its requests are meant.
        Raises PermissionDenied, InvalidRequest, RecordNotFound.
        """
        self._check_on()
        current_caller().check_administers()
        asked = call.request.query_params
        if not (request_id := asked.get("id", "")):
            raise InvalidRequest(FieldViolation("id", "missing", "the id of a request, or the beginning of it"))
        query = RecordQuery(request_id, asked.get("tenant"))
        found = [RequestRecord.from_bytes(one) for one in self._find_records(query)]
        stories = [make_story(one).to_json() for one in of_one_request(found, query)]
        if not stories:
            raise RecordNotFound(request_id, "This page finds those in flight and the last ones of its ingress", [])
        return Response(b'{"stories":[%b]}' % b",".join(stories), 200, dict(HEADERS), "application/json")

    async def trace(self, call: Call) -> Response:
        """Answer with this ingress's last requests as a trace for Perfetto. Raises PermissionDenied."""
        del call
        self._check_on()
        current_caller().check_administers()
        records = self._find_records(RecordQuery("", None, _NUM_TRACED))
        # It takes tens of milliseconds, for which the tokens of all streams would have to wait.
        trace = await asyncio.to_thread(_trace_of, records)
        return Response(trace, 200, dict(HEADERS), "application/json")

    def _file_handler(self, file: PageFile) -> Handler:
        async def answer(call: Call) -> Response:
            del call
            self._check_on()
            return Response(file.data, 200, dict(HEADERS), file.media_type)

        return answer

    def _check_on(self) -> None:
        if self._why_off:
            raise PermissionDenied(self._why_off)


def _trace_of(records: list[bytes]) -> bytes:
    """records: the newest first"""
    return chrome_trace([make_story(RequestRecord.from_bytes(one)) for one in records[::-1]])


def open_paths() -> frozenset[str]:
    """Return the paths that need no token: files that are the same for everybody. The data need one."""
    return frozenset(page_files())


def page_app(
    page: LivePage,
    access: AccessControl,
    in_progress: CallsInProgress,
    hosts: AllowedHosts,
    config: HttpConfig,
    on_answer: Callable[[str, int], None],
) -> Starlette:
    """Return the application of a port that has only the page. on_answer: as in make_app()"""
    guards = Guards(access, hosts, open_paths=open_paths(), probed_paths=frozenset())
    return make_app(list(page.routes(ServerState(in_progress, config))), guards, on_answer)
