"""Tests of actors/core/queue/fair_queue.py."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from actors.config import SchedulerConfig
from actors.core.queue.fair_queue import FairRequestQueue, create_request_queue
from actors.core.queue.request_queue import RequestQueue, order_of
from actors.core.requests.request import Request
from tests.actors.core.builders import make_request

FCFS = SchedulerConfig(fairness="none")
PRIORITY = SchedulerConfig(policy="priority", fairness="none")
FAIR = SchedulerConfig(fairness="tenant", tenant_weights={"double": 2.0})
BY_INGRESS = SchedulerConfig(fairness="ingress")
ALL = pytest.mark.parametrize(
    "config",
    [FCFS, PRIORITY, FAIR, BY_INGRESS, SchedulerConfig(policy="priority", fairness="ingress")],
    ids=["fcfs", "priority", "fair", "by ingress", "priority by ingress"],
)


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def served(queue: RequestQueue, count: int) -> list[str]:
    return [queue.pop_request().request_id for _ in range(count)]


def test_fcfs_serves_in_the_order_of_arrival_and_what_is_prepended_first() -> None:
    queue = create_request_queue(FCFS)
    for request_id in ("a", "b", "c"):
        queue.add_request(make_request(request_id))
    queue.prepend_request(make_request("y"))
    queue.prepend_request(make_request("z"))
    assert ids(queue) == ["z", "y", "a", "b", "c"]
    assert queue.peek_request().request_id == "z"
    assert served(queue, 5) == ["z", "y", "a", "b", "c"]


def test_priority_serves_by_priority_then_arrival_then_id() -> None:
    queue = create_request_queue(PRIORITY)
    for request_id, priority, arrival_s in (("d", 1, 0.0), ("c", 0, 2.0), ("b", 0, 1.0), ("a", 0, 1.0)):
        queue.add_request(make_request(request_id, priority=priority, arrival_time_s=arrival_s))
    assert ids(queue) == ["a", "b", "c", "d"]
    assert served(queue, 4) == ["a", "b", "c", "d"]


def test_what_is_prepended_to_a_priority_queue_goes_to_its_own_place() -> None:
    queue = create_request_queue(PRIORITY)
    queue.add_request(make_request("urgent", priority=0))
    queue.prepend_request(make_request("preempted", priority=5))
    assert ids(queue) == ["urgent", "preempted"]


def test_with_ageing_a_low_priority_is_served_before_those_that_came_much_later() -> None:
    config = SchedulerConfig(policy="priority", priority_ageing_s=10.0)
    queue = create_request_queue(config)
    low = make_request("low", priority=2, arrival_time_s=100.0)
    queue.add_request(make_request("soon", priority=0, arrival_time_s=119.0))
    queue.add_request(low)
    queue.add_request(make_request("late", priority=0, arrival_time_s=121.0))
    assert ids(queue) == ["soon", "low", "late"]
    assert order_of(low, config) == (12.0, 100.0, "low")


@ALL
def test_a_request_can_be_removed_from_the_middle_once(config: SchedulerConfig) -> None:
    queue = create_request_queue(config)
    requests = [make_request(name) for name in ("a", "b", "c", "d")]
    for request in requests:
        queue.add_request(request)
    assert queue.remove_request(requests[1])
    assert not queue.remove_request(requests[1])
    queue.remove_requests([requests[0], requests[2]])
    assert ids(queue) == ["d"]
    assert len(queue) == 1


@ALL
def test_what_was_set_aside_comes_back_to_its_place(config: SchedulerConfig) -> None:
    queue = create_request_queue(config)
    requests = [make_request(name, arrival_time_s=float(index)) for index, name in enumerate("abcd")]
    for request in requests:
        queue.add_request(request)
    queue.remove_request(requests[1])
    queue.remove_request(requests[0])
    queue.restore_request(requests[1])
    queue.restore_request(requests[0])
    assert ids(queue) == ["a", "b", "c", "d"]


@ALL
def test_an_empty_queue_has_nothing_to_peek_at_or_pop(config: SchedulerConfig) -> None:
    queue = create_request_queue(config)
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


# -- tenants ---------------------------------------------------------------------------------------------------------


def add(queue: RequestQueue, request_id: str, tenant: str, size: int = 10) -> Request:
    request = make_request(request_id, size, max_tokens=10, tenant=tenant)
    queue.add_request(request)
    return request


def test_a_burst_of_one_tenant_does_not_delay_another() -> None:
    queue = create_request_queue(FAIR)
    for index in range(1000):
        add(queue, f"burst-{index}", "loud")
    assert served(queue, 3) == ["burst-0", "burst-1", "burst-2"]
    add(queue, "single", "quiet")
    assert "single" in served(queue, 2)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    queue = create_request_queue(FAIR)
    for index in range(100):
        add(queue, f"a{index}", "a")
    served(queue, 60)
    for index in range(30):
        add(queue, f"b{index}", "b")
    first = served(queue, 20)
    assert 9 <= sum(name.startswith("b") for name in first) <= 11


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=40, max_size=40), st.lists(st.integers(1, 50), min_size=40, max_size=40))
def test_backlogged_tenants_are_served_by_their_weights(doubles: list[int], singles: list[int]) -> None:
    """Goyal's bound: normalised service in any window differs by at most one largest request of each."""
    queue = create_request_queue(FAIR)
    for index, (double, single) in enumerate(zip(doubles, singles, strict=True)):
        add(queue, f"d{index}", "double", double)
        add(queue, f"s{index}", "single", single)
    lead = 0.0
    leads = [lead]
    num_left = {"d": 40, "s": 40}
    while all(num_left.values()):
        request = queue.pop_request()
        num_left[request.request_id[0]] -= 1
        cost = request.max_num_tokens
        lead += cost / 2 if request.tenant == "double" else -cost
        leads.append(lead)
    assert max(leads) - min(leads) <= (max(doubles) + 10) / 2 + max(singles) + 10


def test_preempted_requests_come_before_all_tenants_and_are_not_charged_again() -> None:
    queue = create_request_queue(FAIR)
    first = add(queue, "a0", "a")
    add(queue, "b0", "b")
    add(queue, "a1", "a")
    assert queue.pop_request() is first
    first.num_preemptions += 1
    queue.prepend_request(first)
    queue.remove_request(first)
    queue.restore_request(first)
    assert served(queue, 3) == ["a0", "b0", "a1"]


def test_who_leaves_without_being_served_is_not_charged() -> None:
    queue = create_request_queue(FAIR)
    gone = [add(queue, f"a{index}", "a") for index in range(5)]
    add(queue, "b0", "b")
    queue.remove_requests(gone)
    add(queue, "a5", "a")
    add(queue, "b1", "b")
    assert served(queue, 3) == ["b0", "a5", "b1"]


def test_a_restored_request_keeps_its_place_though_its_tenants_queue_was_empty_in_between() -> None:
    queue = create_request_queue(FAIR)
    add(queue, "b0", "b")
    second = add(queue, "b1", "b")
    assert served(queue, 1) == ["b0"]
    queue.remove_request(second)
    add(queue, "b2", "b")
    queue.restore_request(second)
    assert served(queue, 2) == ["b1", "b2"]


def test_a_restored_request_goes_to_the_lane_that_it_came_from_whatever_its_history() -> None:
    queue = create_request_queue(FAIR)
    add(queue, "a0", "a")
    back = make_request("b0", tenant="b")
    queue.prepend_request(back)
    queue.remove_request(back)
    queue.restore_request(back)
    assert served(queue, 2) == ["b0", "a0"]
    first, old = add(queue, "a1", "a"), add(queue, "a2", "a")
    old.num_preemptions += 1
    queue.remove_request(old)
    queue.restore_request(old)
    assert ids(queue) == [first.request_id, old.request_id]


def test_what_many_tenants_leave_behind_is_forgotten() -> None:
    queue = create_request_queue(FAIR)
    for number in range(2000):
        add(queue, f"x{number}", "x")
        add(queue, f"r{number}", f"tenant-{number}")
    served(queue, 3000)
    assert isinstance(queue, FairRequestQueue)
    assert queue.num_remembered_flows <= 2001
    served(queue, 1000)
    assert queue.num_remembered_flows == 0


def test_of_equal_tenants_the_one_that_has_waited_longest_is_next() -> None:
    queue = create_request_queue(FAIR)
    for tenant in ("z", "y", "x"):
        add(queue, tenant, tenant)
    assert ids(queue) == served(queue, 3) == ["z", "y", "x"]


def come(queue: RequestQueue, request_id: str, ingress: int, *, tenant: str = "", priority: int = 0) -> Request:
    request = make_request(request_id, 10, tenant=tenant, client_index=ingress, priority=priority)
    queue.add_request(request)
    return request


def test_a_flood_through_one_ingress_does_not_delay_another_unless_told_otherwise() -> None:
    queue = create_request_queue(SchedulerConfig())
    for index in range(1000):
        come(queue, f"flood-{index}", ingress=1)
    assert served(queue, 3) == ["flood-0", "flood-1", "flood-2"]
    come(queue, "single", ingress=2)
    assert "single" in served(queue, 2)


def test_a_tenant_gets_no_more_by_using_several_ingresses_and_its_ingresses_share_what_it_gets() -> None:
    queue = create_request_queue(SchedulerConfig(fairness="tenant"))
    for index in range(20):
        come(queue, f"a1-{index}", ingress=1, tenant="a")
    for index in range(20):
        come(queue, f"a2-{index}", ingress=2, tenant="a")
        come(queue, f"b1-{index}", ingress=1, tenant="b")
    first = served(queue, 24)
    assert [sum(name.startswith(whose) for name in first) for whose in ("a1", "a2", "b1")] == [6, 6, 12]


def test_what_is_urgent_comes_first_through_whichever_ingress_and_the_others_share() -> None:
    queue = create_request_queue(SchedulerConfig(policy="priority", fairness="ingress"))
    for index in range(4):
        come(queue, f"late-{index}", ingress=1, priority=5)
    come(queue, "other", ingress=2, priority=5)
    last = come(queue, "urgent", ingress=1, priority=0)
    assert ids(queue) == ["urgent", "other", "late-0", "late-1", "late-2", "late-3"]
    queue.remove_request(last)
    queue.restore_request(last)
    preempted = make_request("preempted", 10, client_index=2, priority=3)
    queue.prepend_request(preempted)
    assert ids(queue) == served(queue, 7)


def test_virtual_time_never_goes_back_so_a_newcomer_is_not_ahead_of_who_waited_behind_urgent_ones() -> None:
    queue = create_request_queue(SchedulerConfig(policy="priority", fairness="ingress"))
    for index in range(3):
        come(queue, f"urgent-{index}", ingress=1, priority=0)
        come(queue, f"waited-{index}", ingress=2, priority=5)
    assert served(queue, 4) == ["urgent-0", "urgent-1", "urgent-2", "waited-0"]
    come(queue, "newcomer", ingress=3, priority=5)
    assert served(queue, 3)[0] == "waited-1"


# -- against a sorted list -------------------------------------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """FCFS and priority, with ageing or not, against a list that is sorted anew each time.

    Fairness between ingresses changes nothing while there is one.
    """

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        ageing_s=st.sampled_from([None, 3.0]),
        fairness=st.sampled_from(["none", "ingress"]),
    )
    def start(self, policy: str, ageing_s: float | None, fairness: str) -> None:
        self.config = SchedulerConfig.model_validate(
            {"policy": policy, "priority_ageing_s": ageing_s, "fairness": fairness}
        )
        self.queue = create_request_queue(self.config)
        self.model: list[tuple[tuple[float, float, str], Request]] = []
        self.aside: list[tuple[tuple[float, float, str], Request]] = []
        self.num_made = 0

    @rule(priority=st.integers(0, 3), arrival_s=st.integers(0, 9), comes_back=st.booleans())
    def add(self, priority: int, arrival_s: int, comes_back: bool) -> None:
        self.num_made += 1
        request = make_request(f"r{self.num_made:04}", priority=priority, arrival_time_s=float(arrival_s))
        if comes_back:
            self.queue.prepend_request(request)
        else:
            self.queue.add_request(request)
        place = float(-self.num_made if comes_back else self.num_made)
        is_fcfs = self.config.policy == "fcfs"
        self.model.append(((place, 0.0, "") if is_fcfs else order_of(request, self.config), request))

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        self.model.sort(key=lambda entry: entry[0])
        assert self.queue.peek_request() is self.model[0][1]
        assert self.queue.pop_request() is self.model.pop(0)[1]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), is_for_good=st.booleans())
    def remove(self, data: st.DataObject, is_for_good: bool) -> None:
        entry = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
        assert self.queue.remove_request(entry[1])
        if not is_for_good:
            self.aside.append(entry)

    @precondition(lambda self: self.aside)
    @rule()
    def restore(self) -> None:
        entry = self.aside.pop(0)
        self.queue.restore_request(entry[1])
        self.model.append(entry)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.model)
            assert list(self.queue) == [request for _, request in sorted(self.model, key=lambda entry: entry[0])]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class FairMachine(RuleBasedStateMachine):
    """Start-time fair queueing with plain lists that are searched anew each time, and tags that are never forgotten."""

    @initialize(policy=st.sampled_from(["fcfs", "priority"]), fairness=st.sampled_from(["tenant", "ingress"]))
    def start(self, policy: str, fairness: str) -> None:
        self.config = SchedulerConfig.model_validate(
            {"policy": policy, "fairness": fairness, "tenant_weights": {"b": 2.0}}
        )
        self.weights = {"b": 2.0} if fairness == "tenant" else {}
        self.has_levels = (policy, fairness) == ("priority", "ingress")
        self.queue = create_request_queue(self.config)
        self.entries: list[tuple[bool, tuple[float, float, str], Request]] = []
        self.aside: list[tuple[bool, tuple[float, float, str], Request]] = []
        self.start_tags: dict[str, tuple[float, int]] = {}
        self.finish_tags: dict[str, float] = {}
        self.virtual_time = 0.0
        self.num_made = 0
        self.num_turns = 0

    @rule(tenant=st.sampled_from("abc"), size=st.integers(1, 5), priority=st.integers(0, 2), comes_back=st.booleans())
    def add(self, tenant: str, size: int, priority: int, comes_back: bool) -> None:
        self.num_made += 1
        # Either name of a flow: each ingress has a tenant of its own.
        ingress = "abc".index(tenant)
        request = make_request(
            f"r{self.num_made:04}", size, priority=priority, max_tokens=1, tenant=tenant, client_index=ingress
        )
        if comes_back:
            self.queue.prepend_request(request)
        else:
            self.queue.add_request(request)
        place = (float(-self.num_made if comes_back else self.num_made), 0.0, "")
        order = place if self.config.policy == "fcfs" else order_of(request, self.config)
        self._enter((comes_back and not self.has_levels, order, request), is_new=True)

    @precondition(lambda self: self.entries)
    @rule()
    def pop(self) -> None:
        expected = self._first()
        assert self.queue.peek_request() is expected[2]
        assert self.queue.pop_request() is expected[2]
        if not expected[0]:
            tenant = expected[2].tenant
            start_tag, _ = self.start_tags[tenant]
            self.virtual_time = max(self.virtual_time, start_tag)
            self.finish_tags[tenant] = start_tag + expected[2].max_num_tokens / self.weights.get(tenant, 1.0)
            self.num_turns += 1
            self.start_tags[tenant] = (self.finish_tags[tenant], self.num_turns)
        self._leave(expected)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), is_for_good=st.booleans())
    def remove(self, data: st.DataObject, is_for_good: bool) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        assert self.queue.remove_request(entry[2])
        self._leave(entry)
        if not is_for_good:
            self.aside.append(entry)

    @precondition(lambda self: self.aside)
    @rule()
    def restore(self) -> None:
        entry = self.aside.pop(0)
        self.queue.restore_request(entry[2])
        self._enter(entry, is_new=False)

    def _enter(self, entry: tuple[bool, tuple[float, float, str], Request], *, is_new: bool) -> None:
        tenant = entry[2].tenant
        if not entry[0] and tenant not in self.start_tags:
            self.num_turns += 1
            start_tag = max(self.virtual_time, self.finish_tags.get(tenant, 0.0))
            self.start_tags[tenant] = (start_tag, self.num_turns if is_new else 0)
        self.entries.append(entry)

    def _leave(self, entry: tuple[bool, tuple[float, float, str], Request]) -> None:
        self.entries.remove(entry)
        tenant = entry[2].tenant
        is_open = any(not is_front and request.tenant == tenant for is_front, _, request in self.entries)
        if not is_open and self.start_tags.pop(tenant, None) is not None and not self.start_tags:
            self.virtual_time = max(self.virtual_time, *self.finish_tags.values(), 0.0)

    def _first(self) -> tuple[bool, tuple[float, float, str], Request]:
        front = [entry for entry in self.entries if entry[0]]
        if front:
            return min(front, key=lambda entry: entry[1])
        firsts = {
            tenant: min((entry for entry in self.entries if entry[2].tenant == tenant), key=lambda entry: entry[1])
            for tenant in self.start_tags
        }
        levels = {tenant: entry[1][0] if self.has_levels else 0.0 for tenant, entry in firsts.items()}
        return firsts[min(firsts, key=lambda tenant: (levels[tenant], self.start_tags[tenant], tenant))]

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.entries)
            order = list(self.queue)
            assert order == [self.queue.pop_request() for _ in order]


TestFair = FairMachine.TestCase
TestFair.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
