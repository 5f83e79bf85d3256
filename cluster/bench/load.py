"""Offers a load: sends each request when it is due, even if earlier ones have no answer, and measures its own delays.

In an open loop a slow server cannot slow its own load down. With a limit on the concurrency it can: then a request is
due when it has arrived and a slot is free.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.record import Records, RequestRecord

Send: TypeAlias = Callable[[RequestRecord], Awaitable[None]]
"""Sends a request, and notes in the record what comes. It raises nothing: failures are noted too."""
_LAG_INTERVAL_S: Final = 0.125


class Sender(Protocol):
    """The client side of an API."""

    def prepare(self, request: PlannedRequest) -> Send:
        """Do what can be done before the request is due."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a run.

    duration_s:       from the start until the last answer ended
    peak_concurrency: the most requests that were under way at once
    lag_s:            how late the generator's event loop was, sampled 8 times a second
    cpu_s:            processor time of the generator's process
    """

    records: Records
    duration_s: float
    peak_concurrency: int
    lag_s: array[float]
    cpu_s: float


async def offer_load(
    plan: Sequence[PlannedRequest],
    sender: Sender,
    *,
    max_concurrency: int | None = None,
    seed: int = 0,
    on_change: Callable[[int, int], None] | None = None,
) -> LoadResult:
    """Send every request of the plan, in the order of their arrivals, and wait for every answer.

    max_concurrency: the most requests under way at once; None: no limit
    seed:            chooses the requests whose gaps are kept, see Records
    on_change:       called with the number of requests that were sent and that have ended, at each end
    Cancelling the call cancels all requests that are under way.
    """
    run = _Run(sender, Records(seed), max_concurrency, on_change)
    # Requests that all arrive at time 0 are prepared before the start, unless max_concurrency limits how many are under
    # way.
    num_first = sum(request.arrival_s == 0 for request in plan) if max_concurrency is None else 0
    prepared = [sender.prepare(request) for request in plan[:num_first]]
    loop = asyncio.get_running_loop()
    cpu_s = time.process_time()
    async with _lag_of_loop() as lag_s:
        start_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for index, request in enumerate(plan):
                send = prepared[index] if index < num_first else sender.prepare(request)
                record = RequestRecord(request, start_s + request.arrival_s)
                if (delay_s := record.arrival_s - loop.time()) > 0:
                    await asyncio.sleep(delay_s)
                await run.take_slot(record)
                tasks.create_task(run.send(send, record))
                await asyncio.sleep(0)  # Let the task send its request before the next request is prepared.
        duration_s = loop.time() - start_s
    return LoadResult(run.records, duration_s, run.peak_concurrency, lag_s, time.process_time() - cpu_s)


class _Run:
    """The requests under way."""

    def __init__(
        self,
        sender: Sender,
        records: Records,
        max_concurrency: int | None,
        on_change: Callable[[int, int], None] | None,
    ) -> None:
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._on_change = on_change
        self._num_sent = 0
        self.records = records
        self.peak_concurrency = 0

    async def take_slot(self, record: RequestRecord) -> None:
        record.due_s = record.arrival_s
        if self._slots is not None and self._slots.locked():
            await self._slots.acquire()
            record.due_s = max(record.arrival_s, asyncio.get_running_loop().time())
        elif self._slots is not None:
            await self._slots.acquire()

    async def send(self, send: Send, record: RequestRecord) -> None:
        self._num_sent += 1
        self.peak_concurrency = max(self.peak_concurrency, self._num_sent - len(self.records))
        try:
            await send(record)
        finally:
            if self._slots is not None:
                self._slots.release()
        self.records.add(record)
        if self._on_change is not None:
            self._on_change(self._num_sent, len(self.records))


@asynccontextmanager
async def _lag_of_loop() -> AsyncIterator[array[float]]:
    """Give a growing list of how late the event loop's timers are, in seconds, while the context lasts."""
    loop, lag_s = asyncio.get_running_loop(), array("d")

    async def sample() -> None:
        while True:
            due_s = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            lag_s.append(max(0.0, loop.time() - due_s))

    sampling = asyncio.create_task(sample())
    try:
        yield lag_s
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
