"""The order in which waiting requests are admitted. Every operation is O(log n) at most, however many wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

from actors.config import SchedulerConfig
from actors.core.removable_heap import RemovableHeap
from actors.core.request import Request

# The first part of a place: which queue of a TenantRequestQueue it is in.
_FRONT_LANE = 0.0
_TENANT_LANE = 1.0


class RequestQueue(Protocol):
    """Waiting requests, the next one first. Each is in it at most once."""

    def add_request(self, request: Request) -> None:
        """Add a request at its place."""

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
    """Requests by their queue_place; who makes the places makes the policy.

    lane: every place begins with it, so that a place says in which of several queues it is
    """

    def __init__(self, lane: float = 0.0) -> None:
        self._lane = lane
        self._requests: dict[str, Request] = {}
        self._heap: RemovableHeap[tuple[float, ...]] = RemovableHeap()

    def restore_request(self, request: Request) -> None:
        """Add a request at the place that it had."""
        self._requests[request.request_id] = request
        self._heap.push(request.request_id, request.queue_place)

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

    arrivals: counts what is added, here and in other queues whose places must stay comparable with these
    """

    def __init__(self, lane: float = 0.0, arrivals: Iterator[int] | None = None) -> None:
        super().__init__(lane)
        self._last = itertools.count(0) if arrivals is None else arrivals
        self._first = itertools.count(-1, -1)

    def add_request(self, request: Request) -> None:
        """Add a request at the end."""
        request.queue_place = (self._lane, float(next(self._last)))
        self.restore_request(request)

    def prepend_request(self, request: Request) -> None:
        """Add a request at the front."""
        request.queue_place = (self._lane, float(next(self._first)))
        self.restore_request(request)


class PriorityRequestQueue(_HeapQueue):
    """By (priority, arrival_time, request_id), the smallest first, with ageing if the configuration has it."""

    def __init__(self, config: SchedulerConfig, lane: float = 0.0) -> None:
        super().__init__(lane)
        self._config = config

    def add_request(self, request: Request) -> None:
        """Add a request at the place of its priority."""
        request.queue_place = (self._lane, *order_of(request, self._config)[:2])
        self.restore_request(request)

    def prepend_request(self, request: Request) -> None:
        """Add a request: its priority and arrival say where, whether it is new or comes back."""
        self.add_request(request)


class TenantRequestQueue:
    """Weighted fair: each tenant that has requests waiting gets its share of what is served, whoever has more of them.

    Start-time fair queueing (Goyal, Vin, Cheng 1996) with tenants as flows: a tenant has a start tag; the one with the
    smallest is next; serving a request of cost c moves its tag on by c / weight, and the virtual time to its old tag.
    A tenant that had nothing waiting begins at the virtual time, so that it gains nothing by having been idle. A
    request's cost is its prompt and the tokens that it may generate. Within a tenant the configured policy decides.
    Preempted requests come before all others: they have been paid for. A restored request has its old place among its
    tenant's; if its tenant had nothing else waiting, it comes back at the virtual time, before its equals.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        # Places outlive a tenant's queue, which is closed when it is empty: one count for all of them.
        self._arrivals = itertools.count(0)
        self._front = _create_flat_queue(config, _FRONT_LANE, itertools.count(0))
        self._queues: dict[str, RequestQueue] = {}
        self._finish_tags: dict[str, float] = {}
        self._num_tags_kept = 0
        # Of those that have equal tags the one that has waited longest is next.
        self._start_tags: RemovableHeap[tuple[float, int]] = RemovableHeap()
        self._num_turns = 0
        self._virtual_time = 0.0
        self._num_requests = 0

    @property
    def num_remembered_tenants(self) -> int:
        """Tenants of whose past something is known; bounded by those that are ahead of the virtual time."""
        return len(self._finish_tags)

    def add_request(self, request: Request) -> None:
        """Add a request at the end of its tenant's, or where the policy says among these."""
        self._queue_of(request).add_request(request)
        self._num_requests += 1

    def restore_request(self, request: Request) -> None:
        """Bring a request back to its place among its tenant's, or among those that were prepended."""
        is_prepended = request.queue_place[0] == _FRONT_LANE
        queue = self._front if is_prepended else self._queue_of(request, is_restored=True)
        queue.restore_request(request)
        self._num_requests += 1

    def prepend_request(self, request: Request) -> None:
        """Add a request before those of all tenants that have not run yet."""
        self._front.prepend_request(request)
        self._num_requests += 1

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""
        if self._front:
            return self._front.peek_request()
        first = self._start_tags.peek()
        if first is None:
            raise IndexError("peek into an empty queue")
        return self._queues[first[1]].peek_request()

    def pop_request(self) -> Request:
        """Take the next request out, and charge its tenant. Raises IndexError if there is none."""
        request = self._front.pop_request() if self._front else self._pop_first_tenants()
        self._num_requests -= 1
        return request

    def remove_request(self, request: Request) -> bool:
        """Take a request out without charging anybody; returns whether it was there."""
        queue = self._queues.get(request.tenant)
        if not self._front.remove_request(request) and (queue is None or not queue.remove_request(request)):
            return False
        self._close_if_empty(request.tenant)
        self._num_requests -= 1
        return True

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests out."""
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they would be served if nothing came or went."""
        yield from self._front
        num_turns = self._num_turns
        queues = {tenant: iter(self._queues[tenant]) for tenant in self._start_tags}
        tags = [(self._start_tags.order_of(tenant), tenant) for tenant in queues]
        while tags:
            (start_tag, _), tenant = tags[0]
            request = next(queues[tenant], None)
            if request is None:
                heapq.heappop(tags)
            else:
                yield request
                num_turns += 1
                heapq.heapreplace(tags, ((self._finish_tag(start_tag, request), num_turns), tenant))

    def _pop_first_tenants(self) -> Request:
        request = self.peek_request()
        tenant = request.tenant
        self._virtual_time, _ = self._start_tags.order_of(tenant)
        finish_tag = self._finish_tags[tenant] = self._finish_tag(self._virtual_time, request)
        self._num_turns += 1
        self._start_tags.push(tenant, (finish_tag, self._num_turns))
        self._queues[tenant].remove_request(request)
        self._close_if_empty(tenant)
        return request

    def _finish_tag(self, start_tag: float, request: Request) -> float:
        return start_tag + request.max_num_tokens / self._config.tenant_weights.get(request.tenant, 1.0)

    def _queue_of(self, request: Request, *, is_restored: bool = False) -> RequestQueue:
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _create_flat_queue(self._config, _TENANT_LANE, self._arrivals)
            start_tag = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
            self._num_turns += 1
            self._start_tags.push(tenant, (start_tag, 0 if is_restored else self._num_turns))
        return queue

    def _close_if_empty(self, tenant: str) -> None:
        if tenant in self._queues and not self._queues[tenant]:
            del self._queues[tenant]
            self._start_tags.remove(tenant)
            self._forget_passed_tags()

    def _forget_passed_tags(self) -> None:
        """Forget finish tags that the virtual time has passed: they say nothing any more.

        Only when they have doubled, so that this costs O(1) per tenant that leaves. When nobody waits any more, the
        virtual time passes all of them, as at the end of a busy period in the paper.
        """
        if not self._queues:
            self._virtual_time = max(self._virtual_time, max(self._finish_tags.values(), default=0.0))
            self._finish_tags.clear()
            self._num_tags_kept = 0
        elif len(self._finish_tags) > 2 * self._num_tags_kept + 64:
            self._finish_tags = {name: tag for name, tag in self._finish_tags.items() if tag > self._virtual_time}
            self._num_tags_kept = len(self._finish_tags)


def order_of(request: Request, config: SchedulerConfig) -> tuple[float, float, str]:
    """By what the priority policy serves, the smallest first, and chooses victims, the largest first.

    With priority_ageing_s a request rises by one level for each so many seconds that it waits. All rise alike, so
    that the order of two of them never changes: it is that of priority + arrival_time / priority_ageing_s.
    """
    level = float(request.priority)
    if config.priority_ageing_s is not None:
        level += request.arrival_time / config.priority_ageing_s
    return (level, request.arrival_time, request.request_id)


def create_request_queue(config: SchedulerConfig) -> RequestQueue:
    """Make an empty queue of the configured policy."""
    return (
        TenantRequestQueue(config)
        if config.fairness == "tenant"
        else _create_flat_queue(config, _FRONT_LANE, itertools.count(0))
    )


def _create_flat_queue(config: SchedulerConfig, lane: float, arrivals: Iterator[int]) -> RequestQueue:
    return PriorityRequestQueue(config, lane) if config.policy == "priority" else FCFSRequestQueue(lane, arrivals)
