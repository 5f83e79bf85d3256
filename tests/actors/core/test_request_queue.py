from __future__ import annotations

import pytest

from actors.core.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue, create_request_queue
from tests.actors.core.builders import make_request


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_fcfs_serves_in_the_order_of_arrival_and_what_is_prepended_first() -> None:
    queue = FCFSRequestQueue()
    for request_id in ("a", "b", "c"):
        queue.add_request(make_request(request_id))
    queue.prepend_request(make_request("z"))
    assert ids(queue) == ["z", "a", "b", "c"]
    assert queue.peek_request().request_id == "z"
    assert [queue.pop_request().request_id for _ in range(4)] == ["z", "a", "b", "c"]


def test_priority_serves_by_priority_then_arrival_then_id() -> None:
    queue = PriorityRequestQueue()
    for request_id, priority, arrival_s in (("d", 1, 0.0), ("c", 0, 2.0), ("b", 0, 1.0), ("a", 0, 1.0)):
        queue.add_request(make_request(request_id, priority=priority, arrival_time_s=arrival_s))
    assert ids(queue) == ["a", "b", "c", "d"]
    assert [queue.pop_request().request_id for _ in range(4)] == ["a", "b", "c", "d"]


def test_what_is_prepended_to_a_priority_queue_goes_to_its_own_place() -> None:
    queue = PriorityRequestQueue()
    queue.add_request(make_request("urgent", priority=0))
    queue.prepend_request(make_request("preempted", priority=5))
    assert ids(queue) == ["urgent", "preempted"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_can_be_removed_from_the_middle_once(policy: str) -> None:
    queue = create_request_queue("priority" if policy == "priority" else "fcfs")
    requests = [make_request(name) for name in ("a", "b", "c", "d")]
    for request in requests:
        queue.add_request(request)
    assert queue.remove_request(requests[1])
    assert not queue.remove_request(requests[1])
    queue.remove_requests([requests[0], requests[2]])
    assert ids(queue) == ["d"]
    assert len(queue) == 1


@pytest.mark.parametrize("queue", [FCFSRequestQueue(), PriorityRequestQueue()])
def test_an_empty_queue_has_nothing_to_peek_at_or_pop(queue: RequestQueue) -> None:
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()
