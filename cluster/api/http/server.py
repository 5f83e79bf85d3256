"""The HTTP server of an ingress: uvicorn, in a process with an event loop, signal handlers and logging of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette

from cluster.access.access_control import AccessControl
from cluster.api.http.handlers import HttpHandlers
from cluster.api.http.live_page.live_feed import LiveFeed
from cluster.api.http.live_page.page_access import why_off
from cluster.api.http.live_page.page_handlers import LivePage, page_app
from cluster.api.http.receiving.connections import Connections
from cluster.api.http.receiving.hosts import AllowedHosts
from cluster.api.http.receiving.instant_answers import InstantAnswers
from cluster.api.http.receiving.protocol import BoundedProtocol, ProtocolLimits
from cluster.api.http.receiving.tls_connection import TlsConnection, TlsSettings
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.api.shared.version import server_version
from cluster.errors import AddressUnavailable
from cluster.observability.live.live_snapshot import SnapshotMaker
from cluster.observability.status import ClusterView
from cluster.observability.vllm_dialect import VllmDialect
from cluster.requests.serving import Serving
from cluster.settings.http import HttpConfig

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_LAST_WORDS_S: Final = 1
_ENDING_S: Final = 5.0
_KEEP_ALIVE_IDLE_S: Final = 30
_KEEP_ALIVE_INTERVAL_S: Final = 10


class HttpServer:
    """The HTTP API on its port. start() and drain() run on one event loop."""

    def __init__(
        self,
        serving: Serving,
        view: Callable[[], Awaitable[ClusterView]],
        config: HttpConfig,
        slow_reader_timeout_s: float,
        *,
        host: str,
        access: AccessControl | None = None,
        tls: ssl.SSLContext | None = None,
        allowed_hosts: Sequence[str] | None = None,
        name: str = "",
        has_admin_port: bool = False,
        live_view: Callable[[], Awaitable[ClusterView]] | None = None,
        dialect: VllmDialect | None = None,
    ) -> None:
        """Make the application; start() listens.

        view:          makes a view of the cluster as it was lately, without asking another process
        host:          the address to listen at; the port is in config
        access:        the tokens; None: no tokens are needed
        tls:           None: no encryption
        slow_reader_timeout_s: a client that reads nothing for this long is cut off, in seconds
        allowed_hosts: see the setting ingress.allowed_hosts
        name:          of the ingress, as the live page shows it
        has_admin_port: whether the operators' gRPC API has a port of its own
        live_view:     makes the views for the live page, which need not have all requests; None: as view
        dialect:       adds metrics under vLLM's names; None: there are none
        """
        self._in_progress = CallsInProgress()
        handlers = HttpHandlers(serving, view, config, slow_reader_timeout_s, dialect)
        self._streams = handlers.streams
        access = access or AccessControl()
        hosts = AllowedHosts.of_server(host, allowed_hosts, asks_for_tokens=access.asks_for_tokens)
        make_maker = functools.partial(_snapshot_maker, serving, name)
        self._feed = LiveFeed(live_view or view, make_maker)

        def page(*, has_other_port: bool) -> LivePage:
            reason = why_off(host, asks_for_tokens=access.asks_for_tokens, has_other_port=has_other_port)
            return LivePage(self._feed, self._streams, serving.find_records, reason)

        port = _ListeningAt(host, config.port, slow_reader_timeout_s, tls)
        app_page = page(has_other_port=has_admin_port or config.admin_port is not None)
        app = handlers.app(access, self._in_progress, hosts, app_page)
        instant = InstantAnswers(
            access, hosts, handlers.instant_answers(), CONTENT_TYPE_LATEST, serving.metrics.on_http
        )
        self._listener = _Listener(app, config, port, beside=(self._streams.run, self._feed.run), instant=instant)
        self._page_listener: _Listener | None = None
        if config.admin_port is not None:
            on_answer = serving.metrics.on_http
            app = page_app(page(has_other_port=False), access, self._in_progress, hosts, config, on_answer)
            self._page_listener = _Listener(app, config, dataclasses.replace(port, port=config.admin_port))
        self.admin_port: int | None = None
        """The port of the operators' page if it has one of its own, once start() has returned."""

    async def start(self) -> int:
        """Listen; returns the port. Raises AddressUnavailable."""
        port = await self._listener.start()
        if self._page_listener is not None:
            self.admin_port = await self._page_listener.start()
        return port

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end for up to grace_s, abort the rest, and close.

        Connections are cut off if the server has not closed 6 s later, for example because the process gets no CPU.
        """
        if not self._listener.is_running:
            return
        self._feed.close()
        await self._in_progress.close(grace_s)
        listeners = [one for one in (self._listener, self._page_listener) if one is not None]
        await asyncio.gather(*(listener.close() for listener in listeners))


def _snapshot_maker(serving: Serving, ingress: str) -> SnapshotMaker:
    return SnapshotMaker(
        serving.records, serving.live_records, ingress=ingress, version=server_version(), now_s=time.time()
    )


@dataclass(frozen=True, slots=True)
class _ListeningAt:
    """An address to listen at, and how. tls: None: no encryption"""

    host: str
    port: int
    slow_reader_timeout_s: float
    tls: ssl.SSLContext | None


class _Listener:
    """One application on one port."""

    def __init__(
        self,
        app: Starlette,
        config: HttpConfig,
        at: _ListeningAt,
        beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
        instant: InstantAnswers | None = None,
    ) -> None:
        """Listen at nothing yet.

        beside:  what runs as long as the server does
        instant: answers some calls without the application; None: the application answers all
        """
        self._app = app
        self._config = config
        self._at = at
        self._beside = beside
        self._instant = instant
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether start() was called, and close() was not, or has not cut connections off."""
        return self._running is not None

    async def start(self) -> int:
        """Listen; returns the port. Raises AddressUnavailable."""
        listener = _listen(self._at.host, self._at.port, self._at.slow_reader_timeout_s)
        port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=_connection_factory(self._config, self._at.tls, self._instant),  # type: ignore[arg-type]  # it is called as a class is
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        config.load()
        self._server = _Server(config)
        self._running = asyncio.create_task(self._serve(listener))
        await self._server.has_started.wait()
        return port

    async def _serve(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(run()) for run in self._beside]
            await self._server.serve(sockets=[listener])
            for task in beside:
                task.cancel()

    async def close(self) -> None:
        """Stop listening and close all connections, at the latest after _LAST_WORDS_S and _ENDING_S."""
        if self._running is None:
            return
        self._server.should_exit = True
        try:
            async with asyncio.timeout(_LAST_WORDS_S + _ENDING_S):
                await self._running
        except TimeoutError:
            logger.warning("the HTTP server did not close in time: its remaining connections are closed")
            self._server.cut()
            self._running = None


class _Server(uvicorn.Server):
    """A uvicorn server that tells when it listens, and installs no signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Close the sockets that serve() has left open when it was cancelled."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _connection_factory(
    config: HttpConfig, tls: ssl.SSLContext | None, instant: InstantAnswers | None
) -> Callable[..., asyncio.BaseProtocol]:
    """Return a factory of connections that serve HTTP/1.1 within this server's bounds."""
    connections = Connections(_max_connections(config), time.monotonic)

    class Protocol(BoundedProtocol):
        limits = ProtocolLimits(config.max_header_bytes, config.receive_timeout_s)
        all_connections = connections
        instant_answers = instant

    if tls is None:
        return Protocol
    settings = TlsSettings(tls, config.receive_timeout_s, connections)
    return lambda **options: TlsConnection(functools.partial(Protocol, **options), settings)


def _max_connections(config: HttpConfig) -> int:
    """Return how many connections to accept: as configured, but at most half the files that the process may open."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY or num_files // 2 >= config.max_connections:
        return config.max_connections
    logger.warning(
        "fewer HTTP connections than max_connections can be accepted: the limit on open files is too low (ulimit -n)",
        extra={"max_connections": config.max_connections, "taken": num_files // 2},
    )
    return max(1, num_files // 2)


def _listen(host: str, port: int, slow_reader_timeout_s: float) -> socket.socket:
    """Return a listening socket. Its connections send without delay, and notice peers that vanish."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio sets TCP_NODELAY only for sockets whose protocol was named. Without it an answer's body waits until
        # the client has acknowledged the head, often 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_INTERVAL_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
        timeout_ms = math.ceil(slow_reader_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressUnavailable(f"{host}:{port}", error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener
