"""The order in which waiting requests are admitted. Every operation is O(1), or O(log n) in the heap."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

from actors.core.removable_heap import RemovableHeap
from actors.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests, the next one first. Each is in it at most once."""

    def add_request(self, request: Request) -> None:
        """Add a request at its place."""

    def prepend_request(self, request: Request) -> None:
        """Add a request that goes before all others that the policy counts as its equals."""

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""

    def pop_request(self) -> Request:
        """Take the next request out. Raises IndexError if there is none."""

    def remove_request(self, request: Request) -> bool:
        """Take a request out, wherever it stands; returns whether it was there."""

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come, first served; what is prepended comes before all."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """Add a request at the end."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Add a request at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """Return the front request. Raises IndexError if there is none."""
        for request in self._requests.values():
            return request
        raise IndexError("peek into an empty queue")

    def pop_request(self) -> Request:
        """Take the front request out. Raises IndexError if there is none."""
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> bool:
        """Take a request out; returns whether it was there."""
        return self._requests.pop(request.request_id, None) is not None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """By (priority, arrival_time, request_id), the smallest first: Request.__lt__."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._heap: RemovableHeap[tuple[int, float]] = RemovableHeap()

    def add_request(self, request: Request) -> None:
        """Add a request at the place of its priority."""
        self._requests[request.request_id] = request
        self._heap.push(request.request_id, (request.priority, request.arrival_time))

    def prepend_request(self, request: Request) -> None:
        """Add a request: its priority and arrival say where, whether it is new or comes back."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """Return the most urgent request. Raises IndexError if there is none."""
        first = self._heap.peek()
        if first is None:
            raise IndexError("peek into an empty queue")
        return self._requests[first[1]]

    def pop_request(self) -> Request:
        """Take the most urgent request out. Raises IndexError if there is none."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> bool:
        """Take a request out; returns whether it was there."""
        self._requests.pop(request.request_id, None)
        return self._heap.remove(request.request_id)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[request_id] for request_id in self._heap)


def create_request_queue(policy: Literal["fcfs", "priority"]) -> RequestQueue:
    """Make an empty queue of the configured policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
