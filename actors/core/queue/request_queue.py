"""The order in which waiting requests are admitted. Every operation is O(log n) at most, however many wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from actors.config import SchedulerConfig
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.requests.request import Request

FRONT_LANE: Final = 0.0
"""First part of a request's position where there are several queues: it says in which one the request is."""
FLOW_LANE: Final = 1.0


class RequestQueue(Protocol):
    """Waiting requests, the next one first. Each is in it at most once."""

    def add_request(self, request: Request) -> None:
        """Add a request at its place."""

    def assign_position(self, request: Request) -> None:
        """Give a request the place that it would have if it were added now, without adding it: see restore_request."""

    def prepend_request(self, request: Request) -> None:
        """Add a request that was preempted: it goes before all that the policy counts as its equals."""

    def restore_request(self, request: Request) -> None:
        """Bring a request back that was taken out only to be set aside: it gets the place that it had."""

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""

    def pop_request(self) -> Request:
        """Take the next request out because it is served. Raises IndexError if there is none."""

    def remove_request(self, request: Request) -> bool:
        """Take a request out, wherever it stands, without serving it; returns whether it was there."""

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class _HeapQueue:
    """Requests by their queue_position; who assigns the positions makes the policy.

    lane: every place begins with it, so that a place says in which of several queues it is
    """

    def __init__(self, lane: float = 0.0) -> None:
        self._lane = lane
        self._requests: dict[str, Request] = {}
        self._heap: RemovableHeap[tuple[float, ...]] = RemovableHeap()

    def restore_request(self, request: Request) -> None:
        """Add a request at the place that it had."""
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
    """First come, first served; what is prepended comes before all.

    arrivals: counts what is added, here and in other queues whose positions must stay comparable with these
    """

    def __init__(self, lane: float = 0.0, arrivals: Iterator[int] | None = None) -> None:
        super().__init__(lane)
        self._last = itertools.count(0) if arrivals is None else arrivals
        self._first = itertools.count(-1, -1)

    def assign_position(self, request: Request) -> None:
        """Give a request the place at the end, without adding it."""
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
        """Add a request: its priority and arrival say where, whether it is new or comes back."""
        self.add_request(request)


def order_of(request: Request, config: SchedulerConfig) -> tuple[float, float, str]:
    """Return the sort key of the priority policy: it serves the smallest first, and preempts the largest first.

    With priority_ageing_s a request rises by one level for each priority_ageing_s seconds that it waits. All requests
    rise alike, so the order of two never changes: it is the order of priority + arrival_time / priority_ageing_s.
    """
    level = float(request.priority)
    if config.priority_ageing_s is not None:
        level += request.arrival_time / config.priority_ageing_s
    return (level, request.arrival_time, request.request_id)


def create_flat_queue(config: SchedulerConfig, lane: float, arrivals: Iterator[int]) -> RequestQueue:
    """Make an empty queue of the configured policy, without fairness between flows."""
    return PriorityRequestQueue(config, lane) if config.policy == "priority" else FCFSRequestQueue(lane, arrivals)
