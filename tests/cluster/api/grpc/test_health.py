from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from cluster.api.grpc.health import IngressHealth, follow_engines
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import make_serving
from tests.fakes import FakeEngine, FakePool

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
    await asyncio.wait_for(asyncio.gather(watch, draining), timeout=60)
    return context.written


async def test_a_watch_ends_with_not_serving_when_the_server_drains() -> None:
    assert await watch_until_drained(drains_while_writing=False) == [SERVING, NOT_SERVING]


async def test_a_server_that_drains_in_the_middle_of_a_write_lets_it_end() -> None:
    assert await watch_until_drained(drains_while_writing=True) == [SERVING, NOT_SERVING]


async def test_services_that_need_engines_serve_while_there_are_any_and_roles_while_they_are_filled() -> None:
    pool = FakePool(FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE))
    health = IngressHealth()
    serving = make_serving(pool=pool)
    names = ["raypd.v1.GenerateService", "raypd.role.prefill", "raypd.role.decode"]
    following = asyncio.create_task(follow_engines(health, serving, names[:1]))

    async def statuses() -> list[bool]:
        for _ in range(10):
            await asyncio.sleep(0)
        answers = [await health.Check(health_pb2.HealthCheckRequest(service=name), None) for name in names]  # type: ignore[arg-type]  # unused
        return [answer.status == SERVING for answer in answers]

    assert await statuses() == [True, True, True]
    pool.replace(FakeEngine("d0", EngineRole.DECODE))
    assert await statuses() == [True, False, True]
    pool.replace(FakeEngine("b0", EngineRole.BOTH))
    assert await statuses() == [True, True, True]
    pool.replace()
    assert await statuses() == [False, False, False]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
