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
"""The order of flows: the level of the flow's first request, its start tag, and, among equals, whose turn is older."""


def create_request_queue(config: SchedulerConfig) -> RequestQueue:
    """Make an empty queue of the configured policy and fairness.

    With fairness "tenant" tenants share, and within each the ingresses; with "ingress" the ingresses alone. There, what
    is more urgent by the policy comes first, through whichever ingress it has come.
    """
    # Positions outlive a flow's queue, which is closed when it is empty: one count for all of them.
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
    """Weighted fair: each flow that has requests waiting gets its share of what is served, whoever has more of them.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): a flow has a start tag; the one with the smallest is next;
    serving a request of cost c moves its tag on by c / weight, and the virtual time to its old tag. A flow that had
    nothing waiting begins at the virtual time, so that it gains nothing by having been idle. A request's cost is its
    prompt and the tokens that it may generate. Within a flow its own queue decides. Preempted requests come before all
    others: they have been paid for. A restored request has its old place among its flow's; if its flow had nothing
    else waiting, it comes back at the virtual time, before its equals. With one flow the order is its queue's own.
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
        """make_queue: for one flow; weights: by flow, 1 where there is none

        has_levels: flows share among equals only: what the policy calls more urgent comes first, preempted or not
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
        """Add a request to its flow's queue, at the end or where the policy says."""
        flow = self._flow_of(request)
        self._open(flow).add_request(request)
        self._note_first(flow)
        self._num_requests += 1

    def assign_position(self, request: Request) -> None:
        """Give a request its position among its flow's, without adding it. Positions are comparable across queues."""
        queue = self._queues.get(self._flow_of(request))
        (self._make_queue() if queue is None else queue).assign_position(request)

    def restore_request(self, request: Request) -> None:
        """Bring a request back to its place among its flow's, or among those that were prepended."""
        if request.queue_position[0] == FRONT_LANE:
            self._front.restore_request(request)
        else:
            flow = self._flow_of(request)
            self._open(flow, is_restored=True).restore_request(request)
            self._note_first(flow)
        self._num_requests += 1

    def prepend_request(self, request: Request) -> None:
        """Add a request before those of all flows that have not run yet; with levels, where its own says."""
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
        """Take the next request out, and charge its flow. Raises IndexError if there is none."""
        request = self._front.pop_request() if self._front else self._pop_first_flows()
        self._num_requests -= 1
        return request

    def remove_request(self, request: Request) -> bool:
        """Take a request out without charging anybody; returns whether it was there."""
        flow = self._flow_of(request)
        queue = self._queues.get(flow)
        if not self._front.remove_request(request) and (queue is None or not queue.remove_request(request)):
            return False
        self._close_if_empty(flow)
        self._note_first(flow)
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
        # With levels one that is served first may have a later tag than those that wait.
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
        """Give a flow its rank again if another request of it comes first now."""
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
        """Forget finish tags that the virtual time has passed: they say nothing any more.

        Only when they have doubled, so that this costs O(1) per flow that leaves. When nobody waits any more, the
        virtual time passes all of them, as at the end of a busy period in the paper.
        """
        if not self._queues:
            self._virtual_time = max(self._virtual_time, max(self._finish_tags.values(), default=0.0))
            self._finish_tags.clear()
            self._num_tags_kept = 0
        elif len(self._finish_tags) > 2 * self._num_tags_kept + 64:
            self._finish_tags = {name: tag for name, tag in self._finish_tags.items() if tag > self._virtual_time}
            self._num_tags_kept = len(self._finish_tags)
