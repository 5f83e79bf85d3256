"""The handlers of the live page: its files, and its stream of snapshots for operators."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from cluster.access.access_control import AccessControl
from cluster.access.caller import current_caller
from cluster.api.http.app import Call, Endpoint, Guards, Handler, ServerState, make_app
from cluster.api.http.live_page.live_feed import LiveFeed
from cluster.api.http.live_page.page_files import EVENTS_PATH, HEADERS, PageFile, page_files
from cluster.api.http.open_streams import OpenStreams
from cluster.api.http.receiving.hosts import AllowedHosts
from cluster.api.http.streams import EventStream
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.errors import PermissionDenied
from cluster.settings.http import HttpConfig


class LivePage:
    """The live page of one server."""

    def __init__(self, feed: LiveFeed, streams: OpenStreams, why_off: str = "") -> None:
        """feed: the snapshots; streams: the server's streams; why_off: why nobody gets the page; "": it is on"""
        self._feed = feed
        self._streams = streams
        self._why_off = why_off

    def routes(self, state: ServerState) -> Iterator[Route]:
        """Yield the routes of the page. state: of the server that answers them"""
        handlers = {path: self._file_handler(file) for path, file in page_files().items()}
        for path, handler in {**handlers, EVENTS_PATH: self.events}.items():
            yield Route(path, Endpoint(handler, state, is_work=False), methods=["GET"])

    async def events(self, call: Call) -> Response:
        """Answer with the stream of snapshots. Raises PermissionDenied, Overloaded."""
        del call
        self._check_on()
        current_caller().check_administers()
        self._feed.check_room()
        return EventStream(f"ui-{uuid.uuid4().hex}", MappingProxyType({}), self._feed.watch(), self._streams)

    def _file_handler(self, file: PageFile) -> Handler:
        async def answer(call: Call) -> Response:
            del call
            self._check_on()
            return Response(file.data, 200, dict(HEADERS), file.media_type)

        return answer

    def _check_on(self) -> None:
        if self._why_off:
            raise PermissionDenied(self._why_off)


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
