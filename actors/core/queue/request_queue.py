"""The order of waiting requests by arrival or priority. Every operation is O(log n) at most, however many wait.

By default (scheduler.fairness) each ingress has such a queue of its own, and fair_queue.py chooses the queue whose
first request is next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from actors.config import SchedulerConfig
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.requests.request import Request

FRONT_LANE: Final = 0.0
"""The first number of a request's position where there are several queues; it tells which queue the request is in."""
FLOW_LANE: Final = 1.0


class RequestQueue(Protocol):
    """Waiting requests, the next one first. Each request is in the queue at most once."""

    def add_request(self, request: Request) -> None:
        """Add a request at the position that the policy gives it."""

    def assign_position(self, request: Request) -> None:
        """Give a request the position that it would get if it were added now; restore_request() adds it there later."""

    def prepend_request(self, request: Request) -> None:
        """Add a preempted request, before all requests that are its equals by the policy."""

    def restore_request(self, request: Request) -> None:
        """Add a request that was set aside, at the position that it had before."""

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""

    def pop_request(self) -> Request:
        """Remove and return the next request, to serve it. Raises IndexError if there is none."""

    def remove_request(self, request: Request) -> bool:
        """Remove a request from any position, without serving it. Returns whether it was in the queue."""

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class _HeapQueue:
    """Requests in the order of their queue_position. Subclasses assign the positions, and so define the policy.

    lane: the first number of every position, which tells in which of several queues a request is
    """

    def __init__(self, lane: float = 0.0) -> None:
        self._lane = lane
        self._requests: dict[str, Request] = {}
        self._heap: RemovableHeap[tuple[float, ...]] = RemovableHeap()

    def restore_request(self, request: Request) -> None:
        """Add a request at the position that it had before."""
        self._requests[request.request_id] = request
        self._heap.push(request.request_id, request.queue_position)

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""
        first = self._heap.peek()
        if first is None:
            raise IndexError("peek into an empty queue")
        return self._requests[first[1]]

    def pop_request(self) -> Request:
        """Take the next request out. Raises IndexError if there is none."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> bool:
        """Take a request out; returns whether it was there."""
        if self._requests.pop(request.request_id, None) is None:
            return False
        return self._heap.remove(request.request_id)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[request_id] for request_id in self._heap)


class FCFSRequestQueue(_HeapQueue):
    """Serves requests in the order in which they came; prepended requests come before all others.

    arrivals: the counter that positions are taken from; queues whose positions have to be comparable share one
    """

    def __init__(self, lane: float = 0.0, arrivals: Iterator[int] | None = None) -> None:
        super().__init__(lane)
        self._last = itertools.count(0) if arrivals is None else arrivals
        self._first = itertools.count(-1, -1)

    def assign_position(self, request: Request) -> None:
        """Give a request the position at the end, without adding it."""
        request.queue_position = (self._lane, float(next(self._last)))

    def add_request(self, request: Request) -> None:
        """Add a request at the end."""
        self.assign_position(request)
        self.restore_request(request)

    def prepend_request(self, request: Request) -> None:
        """Add a request at the front."""
        request.queue_position = (self._lane, float(next(self._first)))
        self.restore_request(request)


class PriorityRequestQueue(_HeapQueue):
    """Requests by (priority, arrival_time, request_id), the smallest first, with ageing if the configuration has it."""

    def __init__(self, config: SchedulerConfig, lane: float = 0.0) -> None:
        super().__init__(lane)
        self._config = config

    def assign_position(self, request: Request) -> None:
        """Give a request the position of its priority, without adding the request."""
        request.queue_position = (self._lane, *order_of(request, self._config)[:2])

    def add_request(self, request: Request) -> None:
        """Add a request at the position of its priority."""
        self.assign_position(request)
        self.restore_request(request)

    def prepend_request(self, request: Request) -> None:
        """Add a request at the position of its priority and arrival, whether it is new or was preempted."""
        self.add_request(request)


def order_of(request: Request, config: SchedulerConfig) -> tuple[float, float, str]:
    """Return the sort key of the priority policy: it serves the smallest first, and preempts the largest first.

    With priority_ageing_s, a request rises by one level for each priority_ageing_s seconds that it waits. All requests
    rise equally fast, so the order of two requests never changes: it is that of
    priority + arrival_time / priority_ageing_s.
    """
    level = float(request.priority)
    if config.priority_ageing_s is not None:
        level += request.arrival_time / config.priority_ageing_s
    return (level, request.arrival_time, request.request_id)


def create_flat_queue(config: SchedulerConfig, lane: float, arrivals: Iterator[int]) -> RequestQueue:
    """Make an empty queue of the configured policy, without fairness between flows."""
    return PriorityRequestQueue(config, lane) if config.policy == "priority" else FCFSRequestQueue(lane, arrivals)
