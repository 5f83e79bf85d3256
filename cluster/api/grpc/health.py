"""The health service grpc.health.v1 of an ingress: it follows the engines, and ends its watches in a drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2

from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineRole

_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


ROLES: Final = {role: f"raypd.role.{role}" for role in (EngineRole.PREFILL, EngineRole.DECODE)}
"""For each role the service name whose health tells whether an engine serves in that role.

A cluster that lacks one of the roles goes on with the other engines: each of them can do all of a request.
"""


async def follow_engines(health: IngressHealth, serving: Serving, services: Sequence[str]) -> None:
    """Keep the status of the roles, and of services that need engines, up to date until cancelled."""
    while True:
        change = serving.next_change_of_engines()
        await report_engines(health, serving, services)
        await change.wait()


async def report_engines(health: IngressHealth, serving: Serving, services: Sequence[str]) -> None:
    """Set the status of the services and of the roles once, by the engines that serve now."""
    roles = serving.served_roles()
    for service in services:
        await health.set(service, _STATUS[bool(roles)])
    for role, name in ROLES.items():
        await health.set(name, _STATUS[role in roles])


class IngressHealth(health.aio.HealthServicer):
    """A health service whose watches end, with NOT_SERVING, when the server drains.

    A watch lasts as long as its client wants; a single one would make a draining server wait for its whole grace time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_draining = asyncio.Event()

    async def enter_graceful_shutdown(self) -> None:
        """Report NOT_SERVING for good, and end the watches."""
        await super().enter_graceful_shutdown()
        self._is_draining.set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """Send a service's status, and each change of it, until the server drains."""
        writer = _Writer(context)
        context_of_watch: _Context = writer  # type: ignore[assignment]  # a watch does nothing but write
        watch = asyncio.ensure_future(super().Watch(request, context_of_watch))
        draining = asyncio.ensure_future(self._is_draining.wait())
        try:
            await asyncio.wait((watch, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            draining.cancel()
            await asyncio.gather(watch, draining, return_exceptions=True)
        await writer.finish()


class _Writer:
    """The part of a call's context that a watch uses.

    A write that has begun is never cancelled, because gRPC allows one write at a time.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._last: asyncio.Future[None] | None = None
        self._status: object = None

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        """Write a status, to its end even if the caller is cancelled."""
        self._status = response.status
        self._last = asyncio.ensure_future(self._context.write(response))
        await asyncio.shield(self._last)

    async def finish(self) -> None:
        """Let the last write end, and write NOT_SERVING unless that was the last status written."""
        if self._last is not None:
            await self._last
        if self._status != health_pb2.HealthCheckResponse.NOT_SERVING:
            await self.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
