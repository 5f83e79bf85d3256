"""Waiting for a cluster to become as it should, by what `raypd status` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient

_INTERVAL_S = 0.2


async def status_becomes(
    client: GenerateClient, is_right: Callable[[admin_pb2.GetStatusResponse], bool], timeout_s: float
) -> admin_pb2.GetStatusResponse:
    """The first status that is right. Raises AssertionError with the last one."""
    status = admin_pb2.GetStatusResponse()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                status = await client.status(timeout_s=timeout_s)
                if is_right(status):
                    return status
                await asyncio.sleep(_INTERVAL_S)
    except TimeoutError:
        raise AssertionError(f"after {timeout_s:g} s:\n{describe(status)}") from None


def states(status: admin_pb2.GetStatusResponse) -> dict[str, tuple[int, str]]:
    """Return each engine's incarnation and state."""
    return {engine.engine_id: (engine.incarnation, engine.state) for engine in status.engines}


def is_waiting(status: admin_pb2.GetStatusResponse, engine_id: str, incarnation: int, needs: str) -> bool:
    """Whether this incarnation of an engine has no place yet, and says that it needs this."""
    waiting = [e for e in status.engines if e.state == "pending" and f"it needs {needs}" in e.last_error]
    return (engine_id, incarnation) in {(engine.engine_id, engine.incarnation) for engine in waiting}


def is_whole(status: admin_pb2.GetStatusResponse) -> bool:
    """Whether every engine serves."""
    return all(engine.state == "ready" for engine in status.engines)


def is_idle(status: admin_pb2.GetStatusResponse) -> bool:
    """Whether no engine that is there has anything left of any request."""
    return all(
        _num_requests(engine.load) == 0 and engine.load.free_blocks == engine.load.blocks for engine in status.engines
    )


def _num_requests(load: admin_pb2.EngineLoad) -> int:
    return load.running + load.waiting + load.waiting_for_remote_kvs + load.held


def describe(status: admin_pb2.GetStatusResponse) -> str:
    """For a failed test."""
    engines = [f"{e.engine_id}/{e.incarnation} {e.state} at {e.address}: {e.last_error}" for e in status.engines]
    return "\n".join([*engines, *(decision.text for decision in status.decisions)])
