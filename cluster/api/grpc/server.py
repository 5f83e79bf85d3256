"""The gRPC server of an ingress.

A drain begins with NOT_SERVING as the server's health; new calls are refused. Half a second later connected clients are
told to go elsewhere (GOAWAY), while their streams go on. gRPC sends GOAWAY when a server stops, and a stopped server
listens no more. So a successor listens at the same port, and refuses new calls with the reason, until the last stream
has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.access.access_control import AccessControl
from cluster.access.server_tls import ServerTls
from cluster.api.grpc.admin_service import AdminService
from cluster.api.grpc.embed_service import EmbedService
from cluster.api.grpc.generate_service import ExplainService, GenerateService
from cluster.api.grpc.health import IngressHealth, follow_engines, report_engines
from cluster.api.grpc.interceptor import ADMIN_SERVICE, CallInterceptor
from cluster.api.grpc.model_service import ModelService
from cluster.api.grpc.slow_readers import SlowReaders
from cluster.api.protos.raypd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from cluster.api.shared.admin import ClusterAdmin
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.api.shared.explainer import Explainer, why_off_for_clients
from cluster.errors import AddressUnavailable, InvalidConfig
from cluster.observability.status import ClusterView
from cluster.requests.serving import Serving
from cluster.settings.ingress import IngressConfig

logger = logging.getLogger(__name__)

"""The largest message, in both directions. A prompt of a million token ids has about 3 MB."""
SERVICES: Final = (
    generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name,
    embed_pb2.DESCRIPTOR.services_by_name["EmbedService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
_WITHOUT_ENGINES: Final = ("raypd.v1.ModelService", ADMIN_SERVICE)
"""Services that work without engines."""
_LAST_WORDS_S = 1.0
_NOTICE_S: Final = 0.5
"""How long clients have to leave by themselves, because of health or refusals, before GOAWAY is sent.

gRPC ends a call that a client sends while GOAWAY is on its way with CANCELLED.
"""
_FOREVER_S: Final = 1e6
_REBIND_INTERVAL_S: Final = 0.05
_REBIND_TIMEOUT_S: Final = 5.0
_MAX_PENDING_CALLS: Final = 16_384
_MAX_STREAMS: Final = 2048
"""The most calls in progress on one connection; clients hold back further ones until others have ended."""
_MAX_CONNECTIONS: Final = 4096
"""The most connections; further ones are closed at once."""
_OPTIONS: Final = (
    # Two servers on one port would silently share its connections; the second one has to fail instead.
    ("grpc.so_reuseport", 0),
    # By default gRPC cancels calls beyond 1000 pending ones silently; Serving refuses them with a delay instead.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Windows do not grow with the network's speed, so that data which no handler has asked for stays with its sender.
    ("grpc.http2.bdp_probe", 0),
    # The limit on messages is on compressed bytes: without this option 16 kB could become 16 MB.
    ("grpc.per_message_decompression", 0),
    # A stream can be silent for as long as a prompt is in the queue; clients that ping meanwhile must not be cut off.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Pings find clients that have vanished without closing their connection; their requests are aborted.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class GrpcServerSettings:
    """The settings of a gRPC server, with the tokens and certificates from the files that they name."""

    config: IngressConfig
    access: AccessControl = field(default_factory=AccessControl)
    tls: ServerTls | None = None


class IngressServer:
    """The gRPC server of raypd.v1, grpc.health.v1 and reflection. start() and drain() run on one event loop."""

    def __init__(
        self,
        serving: Serving,
        view: Callable[[], Awaitable[ClusterView]],
        admin: ClusterAdmin,
        settings: GrpcServerSettings,
    ) -> None:
        """Keep what the services use. view: makes a view of the cluster as it is now; admin: the controller"""
        self._serving = serving
        self._admin_service = AdminService(view, admin)
        self._admin = admin
        self._settings = settings
        self.admin_port: int | None = None
        """The port of AdminService once the server has started, if AdminService has a port of its own."""

    async def start(self) -> int:
        """Listen, and report the services' health; returns the port. Raises AddressUnavailable or InvalidConfig."""
        # These objects belong to the running event loop, so they cannot be made earlier.
        self._health = IngressHealth()
        self._in_progress = CallsInProgress()
        self._slow_readers = SlowReaders(self._settings.config.slow_reader_timeout_s)
        settings = self._settings
        server = self._make_main_server()
        self._servers = [server]
        port = self._port = self._listen(server, settings.config.port)
        if settings.config.admin_port is not None:
            admin_server = self._make_server()
            admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin_service, admin_server)
            explainer = Explainer(self._serving, self._admin, settings.config)
            generate_pb2_grpc.add_GenerateServiceServicer_to_server(ExplainService(explainer), admin_server)
            self.admin_port = self._listen(admin_server, settings.config.admin_port)
            self._servers.append(admin_server)
        for each in self._servers:
            await each.start()
        needing_engines = [service for service in SERVICES if service not in _WITHOUT_ENGINES]
        for service in (health.OVERALL_HEALTH, *_WITHOUT_ENGINES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await report_engines(self._health, self._serving, needing_engines)
        self._tasks = [
            asyncio.create_task(self._slow_readers.run()),
            asyncio.create_task(follow_engines(self._health, self._serving, needing_engines)),
        ]
        return port

    async def drain(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end for up to grace_s, abort the rest, and close.

        Nothing listens at the port when the method returns.
        """
        end_s = asyncio.get_running_loop().time() + grace_s
        await self._health.enter_graceful_shutdown()
        is_empty = await self._in_progress.close(min(_NOTICE_S, grace_s))
        if not is_empty and (left_s := end_s - asyncio.get_running_loop().time()) > 0:
            is_empty = await self._send_away(left_s)
        # The last answers and refusals still have to be sent.
        await asyncio.gather(*(server.stop(_LAST_WORDS_S if is_empty else 0) for server in self._servers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_away(self, grace_s: float) -> bool:
        """Tell clients to leave their connections, and wait up to grace_s for calls; returns whether all have ended."""
        # Invariant: at most one stop() of a server is under way. If the grace of two ended at the same time, one would
        # let gRPC cancel calls of a server that the other has freed. So the grace of this one never ends, and the next
        # stop() begins once this one is cancelled.
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._servers[0].stop(_FOREVER_S))
            succeeding = tasks.create_task(self._succeed())
            is_empty = await self._in_progress.close(grace_s)
            succeeding.cancel()
            stopping.cancel()
        return is_empty

    async def _succeed(self) -> None:
        """Listen at the port where the main server has stopped to listen. New calls are refused by then."""
        successor = self._make_main_server()
        try:
            async with asyncio.timeout(_REBIND_TIMEOUT_S):
                while True:
                    await asyncio.sleep(_REBIND_INTERVAL_S)  # gRPC does not say when it has closed its socket.
                    with contextlib.suppress(AddressUnavailable):
                        self._listen(successor, self._port)
                        break
        except (TimeoutError, InvalidConfig) as error:
            logger.warning(
                "cannot listen again while this ingress drains: new clients get no answer",
                extra={"port": self._port, "error": str(error)},
            )
        finally:
            # gRPC frees a server only if it was started and stopped, whether it listens or not.
            self._servers.append(successor)
            await successor.start()

    def _make_main_server(self) -> grpc.aio.Server:
        server = self._make_server()
        why_off = why_off_for_clients(self._settings.config, asks_for_tokens=self._settings.access.asks_for_tokens)
        explainer = Explainer(self._serving, self._admin, self._settings.config, why_off)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(GenerateService(self._serving, explainer), server)
        embed_pb2_grpc.add_EmbedServiceServicer_to_server(EmbedService(self._serving), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self._serving), server)
        if self._settings.config.admin_port is None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin_service, server)
        return server

    def _make_server(self) -> grpc.aio.Server:
        settings = self._settings
        sizes = tuple(
            (f"grpc.max_{way}_message_length", settings.config.max_message_bytes) for way in ("receive", "send")
        )
        interceptor = CallInterceptor(settings.access, self._in_progress, self._slow_readers)
        server = grpc.aio.server(options=(*_OPTIONS, *sizes), interceptors=[interceptor])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _listen(self, server: grpc.aio.Server, port: int) -> int:
        address, tls = f"{self._settings.config.host}:{port}", self._settings.tls
        try:
            if tls is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, tls.grpc_credentials())
        except RuntimeError as exc:
            raise AddressUnavailable(address, str(exc)) from exc
