"""Watch what an operator would see all the while: GetStatus, asked several times a second and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed, GenerateClient

_INTERVAL_S: Final = 0.2
_CALL_TIMEOUT_S: Final = 2.0
_MAX_AGE_S: Final = 1.5
"""Heartbeats come twice a second: what is older is of an engine that the ingress has no session with."""


class StatusWatch:
    """Times are monotonic seconds.

    affected:    ids of requests that were seen in a second attempt, or resumed by their clients
    ready_since: when each incarnation of each engine was first seen ready
    """

    def __init__(self, address: str, engine_ids: Sequence[str]) -> None:
        """engine_ids: of the engines that the whole cluster has."""
        self._address = address
        self.engine_ids = tuple(engine_ids)
        self.latest: admin_pb2.GetStatusResponse | None = None
        self._asked_s = 0.0
        self._interval_s = _INTERVAL_S
        self._news = asyncio.Event()
        self._incarnations = dict.fromkeys(engine_ids, 1)
        self.affected: set[str] = set()
        self.ready_since: dict[tuple[str, int], float] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Asks within the block."""
        task = asyncio.create_task(self._ask_forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def expect_new_incarnation(self, engine_id: str, incarnation: int) -> None:
        """Take the cluster for calm again only when a later incarnation of this engine serves."""
        self._incarnations[engine_id] = incarnation + 1

    def engine(self, engine_id: str) -> admin_pb2.EngineStatus:
        """Return an engine's status in the latest answer. Raises LookupError if it was not in it."""
        for engine in self.latest.engines if self.latest is not None else ():
            if engine.engine_id == engine_id:
                return engine
        raise LookupError(f"{engine_id} is not in the status")

    def requests_on(self, engine_id: str) -> frozenset[str]:
        """Ids of the requests that were on this engine, as of the latest answer."""
        return frozenset(
            request.request_id.partition("+")[0]
            for request in (self.latest.requests if self.latest is not None else ())
            if engine_id in (request.prefill_engine, request.decode_engine)
        )

    async def until_calm(self, timeout_s: float) -> float:
        """Until ingress, controller and all engines serve, as asked after this call; returns when that was."""
        return await self._until(self._is_calm, timeout_s, "the cluster serves whole")

    async def until_idle(self, timeout_s: float) -> float:
        """Until, besides, no request is left anywhere and every block is free."""
        return await self._until(lambda status: self._is_calm(status) and is_idle(status), timeout_s, "it is idle")

    async def until_incarnation(self, engine_id: str, incarnation: int, timeout_s: float) -> float:
        """Wait until this incarnation of the engine, or a later one, has begun."""

        def has_begun(status: admin_pb2.GetStatusResponse) -> bool:
            return any(e.engine_id == engine_id and e.incarnation >= incarnation for e in status.engines)

        return await self._until(has_begun, timeout_s, f"{engine_id} begins incarnation {incarnation}")

    async def until_busy(self, engine_id: str, timeout_s: float) -> None:
        """Until a request that has had output is on this engine, or for so long; asks without a pause meanwhile."""

        def is_busy(status: admin_pb2.GetStatusResponse) -> bool:
            return any(
                request.output_tokens and engine_id in (request.prefill_engine, request.decode_engine)
                for request in status.requests
            )

        self._interval_s = 0.0
        with contextlib.suppress(AssertionError):
            await self._until(is_busy, timeout_s, f"{engine_id} has a request")
        self._interval_s = _INTERVAL_S

    async def _until(self, holds: Callable[[admin_pb2.GetStatusResponse], bool], timeout_s: float, what: str) -> float:
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while self.latest is None or self._asked_s < since_s or not holds(self.latest):
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}. The latest status:\n{self.latest}") from None
        return time.monotonic()

    async def _ask_forever(self) -> None:
        while True:
            async with GenerateClient(self._address) as client:
                try:
                    while True:
                        asked_s = time.monotonic()
                        self._take(asked_s, await client.status(timeout_s=_CALL_TIMEOUT_S))
                        await asyncio.sleep(self._interval_s)
                except CallFailed:
                    self._take(asked_s, None)
            # A connection of its own for each try: gRPC would wait longer and longer to dial a dead ingress again.
            await asyncio.sleep(_INTERVAL_S)

    def _take(self, asked_s: float, status: admin_pb2.GetStatusResponse | None) -> None:
        self.latest, self._asked_s = status, asked_s
        for request in status.requests if status is not None else ():
            # What a client resumes has the same id, with a plus and the number of the call.
            request_id, is_resumed, _ = request.request_id.partition("+")
            if is_resumed or request.attempt > 1:
                self.affected.add(request_id)
        for engine in status.engines if status is not None else ():
            if engine.state == "ready":
                self.ready_since.setdefault((engine.engine_id, engine.incarnation), time.monotonic())
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _is_calm(self, status: admin_pb2.GetStatusResponse) -> bool:
        serving = {
            engine.engine_id
            for engine in status.engines
            if engine.state == "ready"
            and engine.incarnation >= self._incarnations[engine.engine_id]
            and engine.age_seconds < _MAX_AGE_S
        }
        return not status.controller_error and serving == set(self.engine_ids) and len(status.engines) == len(serving)


def is_idle(status: admin_pb2.GetStatusResponse) -> bool:
    """Whether no request is anywhere, and every block of every pool is free or cached."""
    return not status.requests and all(
        engine.load.free_blocks == engine.load.blocks > 0
        and engine.load.running == engine.load.waiting == engine.load.waiting_for_remote_kvs == engine.load.held == 0
        and engine.transfers.active == engine.transfers.pinned_blocks == 0
        for engine in status.engines
    )
