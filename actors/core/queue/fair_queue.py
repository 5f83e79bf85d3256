"""Queues that share an engine fairly between tenants, and between the ingresses that requests come through."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from actors.config import SchedulerConfig
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.queue.request_queue import FLOW_LANE, FRONT_LANE, RequestQueue, create_flat_queue, order_of
from actors.core.requests.request import Request

_Rank = tuple[float, float, int]
"""The order of flows: the priority level of the flow's first request, the flow's start tag, and the number of its turn.

The smallest comes first; the number decides between equals in favour of the flow that was added or served earlier.
"""


def create_request_queue(config: SchedulerConfig) -> RequestQueue:
    """Make an empty queue of the configured policy and fairness.

    With fairness "tenant", tenants share the engine, and the ingresses share each tenant's part. With "ingress", the
    ingresses share the engine. Between ingresses, a request that is more urgent by the priority policy comes first,
    whichever ingress it came through.
    """
    # A flow's queue is removed when it is empty, but its requests keep their positions. So all queues use one counter.
    arrivals = itertools.count(0)

    def make_flat() -> RequestQueue:
        return create_flat_queue(config, FLOW_LANE, arrivals)

    def make_shared_by_ingresses() -> RequestQueue:
        return FairRequestQueue(config, _ingress_of, make_flat, has_levels=config.policy == "priority")

    if config.fairness == "tenant":
        return FairRequestQueue(config, _tenant_of, make_shared_by_ingresses, weights=config.tenant_weights)
    return make_shared_by_ingresses() if config.fairness == "ingress" else make_flat()


def _tenant_of(request: Request) -> str:
    return request.tenant


def _ingress_of(request: Request) -> str:
    return str(request.client_index)


class FairRequestQueue:
    """Serves flows (tenants, or ingresses) by weighted fair queueing, however many requests each of them has.

    The algorithm is start-time fair queueing (Goyal, Vin, Cheng 1996). Each flow has a start tag, and the flow with the
    smallest tag is served next. Serving a request of cost c adds c / weight to the flow's tag; the virtual time becomes
    the tag that the flow had before. A flow without waiting requests gets the virtual time as its tag when a request
    comes, so it gains nothing by having been idle. A request's cost is the number of its prompt tokens and of the
    tokens that it may generate. Within a flow, the flow's own queue decides.

    Preempted requests come before all others, since their flow has been charged for them. A restored request gets its
    old position within its flow; if its flow had no other request waiting, the flow comes back at the virtual time,
    before flows with the same tag.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        flow_of: Callable[[Request], str],
        make_queue: Callable[[], RequestQueue],
        *,
        weights: Mapping[str, float] | None = None,
        has_levels: bool = False,
    ) -> None:
        """Make an empty queue.

        flow_of:    returns the flow that a request belongs to
        make_queue: makes the queue of one flow
        weights:    by flow; a flow without one has weight 1
        has_levels: fairness holds only among requests of the same priority level; more urgent requests come first,
            whether they were preempted or not
        """
        self._config = config
        self._flow_of = flow_of
        self._make_queue = make_queue
        self._weights = weights or {}
        self._has_levels = has_levels
        self._front = create_flat_queue(config, FRONT_LANE, itertools.count(0))
        self._queues: dict[str, RequestQueue] = {}
        self._finish_tags: dict[str, float] = {}
        self._num_tags_kept = 0
        self._ranks: RemovableHeap[_Rank] = RemovableHeap()
        self._num_turns = 0
        self._virtual_time = 0.0
        self._num_requests = 0

    @property
    def num_remembered_flows(self) -> int:
        """The number of flows whose finish tag is kept."""
        return len(self._finish_tags)

    def add_request(self, request: Request) -> None:
        """Add a request to its flow's queue, at the position that the policy gives it."""
        flow = self._flow_of(request)
        self._open(flow).add_request(request)
        self._note_first(flow)
        self._num_requests += 1

    def assign_position(self, request: Request) -> None:
        """Give a request its position within its flow, without adding it. Positions can be compared across queues."""
        queue = self._queues.get(self._flow_of(request))
        (self._make_queue() if queue is None else queue).assign_position(request)

    def restore_request(self, request: Request) -> None:
        """Put a request back at its old position, within its flow or among the preempted requests."""
        if request.queue_position[0] == FRONT_LANE:
            self._front.restore_request(request)
        else:
            flow = self._flow_of(request)
            self._open(flow, is_restored=True).restore_request(request)
            self._note_first(flow)
        self._num_requests += 1

    def prepend_request(self, request: Request) -> None:
        """Add a preempted request before all requests that have not run yet; with levels, at its level's position."""
        if self._has_levels:
            self.add_request(request)
        else:
            self._front.prepend_request(request)
            self._num_requests += 1

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""
        if self._front:
            return self._front.peek_request()
        first = self._ranks.peek()
        if first is None:
            raise IndexError("peek into an empty queue")
        return self._queues[first[1]].peek_request()

    def pop_request(self) -> Request:
        """Remove and return the next request, and charge its flow. Raises IndexError if there is none."""
        request = self._front.pop_request() if self._front else self._pop_first_flows()
        self._num_requests -= 1
        return request

    def remove_request(self, request: Request) -> bool:
        """Remove a request without charging its flow. Returns whether it was in the queue."""
        flow = self._flow_of(request)
        queue = self._queues.get(flow)
        if not self._front.remove_request(request) and (queue is None or not queue.remove_request(request)):
            return False
        self._close_if_empty(flow)
        self._note_first(flow)
        self._num_requests -= 1
        return True

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove several requests without charging their flows."""
        for request in requests:
            self.remove_request(request)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in the order in which they would be served if no others came."""
        yield from self._front
        num_turns = self._num_turns
        waiting = {flow: iter(self._queues[flow]) for flow in self._ranks}
        firsts = [(self._ranks.order_of(flow), flow, next(requests)) for flow, requests in waiting.items()]
        heapq.heapify(firsts)
        while firsts:
            (_, start_tag, _), flow, request = firsts[0]
            yield request
            num_turns += 1
            following = next(waiting[flow], None)
            if following is None:
                heapq.heappop(firsts)
            else:
                rank = self._level_of(following), self._finish_tag(flow, start_tag, request), num_turns
                heapq.heapreplace(firsts, (rank, flow, following))

    def _pop_first_flows(self) -> Request:
        first = self._ranks.peek()
        if first is None:
            raise IndexError("pop from an empty queue")
        (level, start_tag, _), flow = first
        request = self._queues[flow].pop_request()
        # With levels, a flow that is served first may have a larger tag than flows that wait.
        self._virtual_time = max(self._virtual_time, start_tag)
        finish_tag = self._finish_tags[flow] = self._finish_tag(flow, start_tag, request)
        self._num_turns += 1
        self._ranks.push(flow, (level, finish_tag, self._num_turns))
        self._close_if_empty(flow)
        self._note_first(flow)
        return request

    def _level_of(self, request: Request) -> float:
        return order_of(request, self._config)[0] if self._has_levels else 0.0

    def _note_first(self, flow: str) -> None:
        """Update a flow's rank if its first request has another priority level now."""
        if self._has_levels and (queue := self._queues.get(flow)):
            level, start_tag, turn = self._ranks.order_of(flow)
            if (new_level := self._level_of(queue.peek_request())) != level:
                self._ranks.push(flow, (new_level, start_tag, turn))

    def _finish_tag(self, flow: str, start_tag: float, request: Request) -> float:
        return start_tag + request.max_num_tokens / self._weights.get(flow, 1.0)

    def _open(self, flow: str, *, is_restored: bool = False) -> RequestQueue:
        queue = self._queues.get(flow)
        if queue is None:
            queue = self._queues[flow] = self._make_queue()
            start_tag = max(self._virtual_time, self._finish_tags.get(flow, 0.0))
            self._num_turns += 1
            self._ranks.push(flow, (0.0, start_tag, 0 if is_restored else self._num_turns))
        return queue

    def _close_if_empty(self, flow: str) -> None:
        if flow in self._queues and not self._queues[flow]:
            del self._queues[flow]
            self._ranks.remove(flow)
            self._forget_passed_tags()

    def _forget_passed_tags(self) -> None:
        """Forget finish tags that are smaller than the virtual time, since they have no effect any more.

        This is done when the number of tags has doubled, so it costs O(1) for each flow that leaves. When no request
        waits, the virtual time becomes the largest tag, as at the end of a busy period in the paper.
        """
        if not self._queues:
            self._virtual_time = max(self._virtual_time, max(self._finish_tags.values(), default=0.0))
            self._finish_tags.clear()
            self._num_tags_kept = 0
        elif len(self._finish_tags) > 2 * self._num_tags_kept + 64:
            self._finish_tags = {name: tag for name, tag in self._finish_tags.items() if tag > self._virtual_time}
            self._num_tags_kept = len(self._finish_tags)
