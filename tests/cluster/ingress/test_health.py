from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from cluster.ingress.health import IngressHealth

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class SlowContext:
    """Writes one answer at a time, when the test lets it, and fails on a second one as gRPC does."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.may_write = asyncio.Event()
        self.is_writing = False
        self.has_begun = asyncio.Event()
        self.has_written = asyncio.Event()

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        assert not self.is_writing, "two writes at once"
        self.is_writing = True
        self.has_begun.set()
        await self.may_write.wait()
        self.is_writing = False
        self.written.append(response.status)
        self.has_written.set()


async def watch_until_drained(*, drains_while_writing: bool) -> list[int]:
    health = IngressHealth()
    await health.set("s", SERVING)
    context = SlowContext()
    if not drains_while_writing:
        context.may_write.set()
    request = health_pb2.HealthCheckRequest(service="s")
    watch = asyncio.ensure_future(health.Watch(request, context))  # type: ignore[arg-type]  # all that a watch uses
    await (context.has_begun if drains_while_writing else context.has_written).wait()
    draining = asyncio.ensure_future(health.enter_graceful_shutdown())
    await asyncio.sleep(0)
    context.may_write.set()
    await asyncio.wait_for(asyncio.gather(watch, draining), timeout=10)
    return context.written


async def test_a_watch_ends_with_not_serving_when_the_server_drains() -> None:
    assert await watch_until_drained(drains_while_writing=False) == [SERVING, NOT_SERVING]


async def test_a_server_that_drains_in_the_middle_of_a_write_lets_it_end() -> None:
    assert await watch_until_drained(drains_while_writing=True) == [SERVING, NOT_SERVING]
