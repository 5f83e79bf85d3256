"""grpc.health.v1 for a server that drains."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class IngressHealth(health.aio.HealthServicer):
    """Health whose watches end, with NOT_SERVING, when the server drains.

    A watch lasts as long as its client wants, and one alone would keep a draining server up for all of its grace.
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
        watch = asyncio.ensure_future(super().Watch(request, context))
        draining = asyncio.ensure_future(self._is_draining.wait())
        try:
            await asyncio.wait((watch, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            draining.cancel()
            await asyncio.gather(watch, draining, return_exceptions=True)
        await context.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
