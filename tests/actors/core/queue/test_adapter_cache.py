"""Adapters are loaded for those that need them, and dropped when nobody does and there is no room.

Tests of actors/core/requests/adapter.py.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.queue.adapter_cache import AdapterCache
from actors.core.requests.adapter import Adapter, AdapterCommands
from actors.core.requests.request import Request, RequestStatus
from tests.actors.core.builders import make_request


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/adapters/{name}", "0")


def end(cache: AdapterCache, request: Request) -> None:
    request.set_status(RequestStatus.FINISHED_ABORTED, 0.0)
    cache.release(request)


def test_a_request_waits_until_its_adapter_is_loaded() -> None:
    cache = AdapterCache(2, 10.0)
    request = make_request("a", 4, lora_name="x")
    assert cache.start(request, 0.0)
    assert cache.take_commands() == AdapterCommands(loads=(adapter("x"),))
    assert cache.take_commands() is None, "it is told once"
    assert cache.take_over(1.0) == []
    cache.take_in({"x@0": None})
    [over] = cache.take_over(1.0)
    assert (over.request, over.failure) == (request, None)
    assert not cache.start(make_request("b", 4, lora_name="x"), 2.0), "the next one does not wait"


def test_the_one_that_was_used_longest_ago_makes_room_but_none_that_is_needed() -> None:
    cache = AdapterCache(3, 10.0, [adapter("x"), adapter("y"), adapter("z")])
    users = {name: make_request(name, 4, lora_name=name) for name in "xyz"}
    for name in "yxz":
        assert not cache.start(users[name], 0.0)
    cache.start(make_request("w", 4, lora_name="w"), 0.0)
    assert cache.take_commands() is None, "all of them are needed"
    end(cache, users["x"])
    end(cache, users["y"])
    assert cache.take_commands() == AdapterCommands(loads=(adapter("w"),), drops=("y@0",))
    assert cache.make_stats().num_evictions == 1


def test_a_load_that_fails_ends_those_that_wait_for_it_alone() -> None:
    cache = AdapterCache(2, 10.0)
    bad, good = make_request("a", 4, lora_name="bad"), make_request("b", 4, lora_name="good")
    for request in (bad, good):
        cache.start(request, 0.0)
    cache.take_commands()
    cache.take_in({"bad@0": "it is broken", "good@0": None})
    over = {one.request: (one.failure, one.is_adapters_fault) for one in cache.take_over(1.0)}
    assert over == {bad: ("it is broken", True), good: (None, False)}
    assert cache.take_commands() == AdapterCommands(drops=("bad@0",)), "some of the ranks may have it"
    assert cache.start(make_request("c", 4, lora_name="bad"), 2.0)
    assert cache.take_commands() == AdapterCommands(loads=(adapter("bad"),)), "it may be there by now"


def test_who_waits_too_long_is_told_so() -> None:
    cache = AdapterCache(1, 10.0)
    request = make_request("a", 4, lora_name="x")
    cache.start(request, 5.0)
    assert (cache.next_deadline(), cache.take_over(14.9)) == (15.0, [])
    [over] = cache.take_over(15.0)
    assert (over.failure, over.is_adapters_fault) == ("adapter 'x' was not loaded within 10 s", False)
    assert cache.next_deadline() is None


def test_a_request_that_ends_while_it_waits_is_not_heard_of_again() -> None:
    cache = AdapterCache(1, 10.0)
    request = make_request("a", 4, lora_name="x")
    cache.start(request, 0.0)
    cache.take_commands()
    cache.take_in({"x@0": None})
    end(cache, request)
    assert (cache.take_over(0.0), cache.waiting(), cache.next_deadline()) == ([], [], None)


def test_who_preloads_is_told_what_became_of_it() -> None:
    cache, told = AdapterCache(2, 10.0), list[str | None]()
    cache.preload(adapter("x"), told.append)
    cache.preload(adapter("y"), told.append)
    cache.take_commands()
    cache.take_in({"x@0": None, "y@0": "it is broken"})
    assert told == [None, "it is broken"]
    cache.preload(adapter("x"), told.append)
    assert told == [None, "it is broken", None]


class AdapterCacheMachine(RuleBasedStateMachine):
    """Requests come and go; the workers answer in whatever order, and some loads fail."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = AdapterCache(2, 50.0)
        self.live: list[Request] = []
        self.ready: set[str] = set()
        self.loading: list[str] = []
        self.held: set[str] = set()
        self.now_s = 0.0
        self.num_requests = 0

    @rule(name=st.sampled_from("vwxyz"))
    def arrive(self, name: str) -> None:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", 4, lora_name=name)
        self.live.append(request)
        if not self.cache.start(request, self.now_s):
            self.ready.add(request.request_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.ready.discard(request.request_id)
        end(self.cache, request)

    @rule()
    def step(self) -> None:
        self.now_s += 1
        for over in self.cache.take_over(self.now_s):
            assert over.request in self.live
            if over.failure is None:
                self.ready.add(over.request.request_id)
            else:
                self.live.remove(over.request)
                end(self.cache, over.request)
        commands = self.cache.take_commands() or AdapterCommands()
        self.held -= set(commands.drops)
        assert not {one.key for one in commands.loads} & (self.held | set(self.loading)), "it was there already"
        self.loading += [one.key for one in commands.loads]
        assert len(self.held) + len(self.loading) <= 2

    @precondition(lambda self: self.loading)
    @rule(failure=st.sampled_from([None, None, "broken"]), data=st.data())
    def answer(self, failure: str | None, data: st.DataObject) -> None:
        key = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        if failure is None:
            self.held.add(key)
        self.cache.take_in({key: failure})

    @invariant()
    def who_is_ready_has_its_adapter(self) -> None:
        self.cache.check_integrity()
        for request in self.live:
            if request.request_id in self.ready:
                assert request.lora_name in self.held

    def teardown(self) -> None:
        for _ in range(4 * len(self.live) + 8):
            self.step()
            if self.loading:
                self.held.add(key := self.loading.pop())
                self.cache.take_in({key: None})
            for request in [one for one in self.live if one.request_id in self.ready]:
                self.live.remove(request)
                end(self.cache, request)
        assert not self.live, "whoever waits gets its adapter, or is told why not"


TestAdapterCache = AdapterCacheMachine.TestCase
TestAdapterCache.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("loaded", [[], [adapter("x")]])
def test_stats_count_what_happened(loaded: list[Adapter]) -> None:
    cache = AdapterCache(2, 10.0, loaded)
    cache.start(make_request("a", 4, lora_name="y"), 0.0)
    cache.take_commands()
    stats = cache.make_stats()
    assert (stats.loaded, stats.num_waiting_reqs, stats.num_loads) == ([one.name for one in loaded], 1, 1)
