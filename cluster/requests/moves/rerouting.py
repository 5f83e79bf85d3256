"""Gives prompts that wait in a queue to engines that have run out of prompts.

A request is routed when it comes, by what is predicted then. In a burst that is long before most prompts are computed:
a queue may take longer than was predicted, and a decode engine that was to be kept free of prompts, for the sake of
requests that were in time, has none left that are. So the prompts that wait longest are looked at again and again. If
an engine has soon computed its own, and the cost of a placement there is less than that of waiting on, the request
leaves its engines and is submitted there; it loses nothing but its place in the queue. The router decides
(CostRouter.reroute), and what is done about it differs between an ingress and a simulation.

Only the last prompt of a queue moves: those before it are computed sooner. Each ingress moves its own requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, TypeAlias

from cluster.routing.engine_connection import EngineKey
from cluster.routing.load_book import LoadBook

_INTERVAL_S: Final = 0.1
_MIN_WAIT_S: Final = 0.2
"""A prompt that is computed sooner stays: its computation may have begun by the time that an abort arrives."""
_MAX_QUEUES: Final = 4
"""The longest queues, whose last prompts are looked at."""
_MAX_AT_ONCE: Final = 8

Reroute: TypeAlias = Callable[[], bool]
"""Submits a waiting request elsewhere if its router says so, and returns whether it did. Does not block."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    engine: EngineKey
    reroute: Reroute


class Rerouting:
    """The requests of one ingress whose prompts wait to be computed. Belongs to its event loop.

    Invariant: a look is due iff a request waits.
    """

    def __init__(self, load_book: LoadBook, later: Callable[[float, Callable[[], None]], object] | None = None) -> None:
        """Know no request yet.

        load_book: the engines' work
        later:     calls a function after so many seconds; None: the running event loop does
        """
        self._load_book = load_book
        self._later = later or (lambda delay_s, call: asyncio.get_running_loop().call_later(delay_s, call))
        self._is_due = False
        self._waiting: dict[str, _Waiting] = {}
        self._queues: dict[EngineKey, dict[str, None]] = {}
        """The ids of the requests that wait at each engine, in the order in which they were submitted."""

    def wait(self, request_id: str, engine: EngineKey, reroute: Reroute) -> None:
        """Look at a request from time to time, until it is forgotten. engine: the one that will compute its prompt"""
        self._waiting[request_id] = _Waiting(engine, reroute)
        self._queues.setdefault(engine, {})[request_id] = None
        self._plan_a_look()

    def forget(self, request_id: str) -> None:
        """Look at a request no more: it has a token, has ended, or has been submitted elsewhere."""
        known = self._waiting.pop(request_id, None)
        if known is None:
            return
        queue = self._queues[known.engine]
        del queue[request_id]
        if not queue:
            del self._queues[known.engine]

    def _plan_a_look(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            self._later(_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._is_due = False
        for _ in range(_MAX_AT_ONCE):
            if not self._reroute_one():
                break
        self._plan_a_look()

    def _reroute_one(self) -> bool:
        last = ((engine, next(reversed(queue))) for engine, queue in self._queues.items())
        waits = ((self._load_book.starts_in_s(engine, request_id), request_id) for engine, request_id in last)
        longest = nlargest(_MAX_QUEUES, (wait for wait in waits if wait[0] >= _MIN_WAIT_S))
        return any(self._waiting[request_id].reroute() for _, request_id in longest)
