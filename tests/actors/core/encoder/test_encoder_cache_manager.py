from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.requests.multimodal import MultiModalFeature
from actors.core.requests.request import Request
from actors.errors import IntegrityError
from tests.actors.core.builders import make_request

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5}


def request_with(request_id: str, *hashes: str) -> Request:
    features = [MultiModalFeature(name, 10 * index, 8, SIZES[name]) for index, name in enumerate(hashes)]
    return make_request(request_id, 50, mm_features=features)


def freed(cache: EncoderCacheManager) -> list[str]:
    """Return what the worker forgets, without the sizes."""
    return [key.partition("/")[0] for key in cache.get_freed_mm_hashes()]


def test_an_entry_is_shared_and_stays_until_its_space_is_needed() -> None:
    cache = EncoderCacheManager(6)
    first, second = request_with("r1", "a"), request_with("r2", "a", "d")
    assert not cache.check_and_update_cache(first, 0)
    assert cache.can_allocate(first, 0, 100, 0)
    cache.allocate(first, 0)
    assert cache.check_and_update_cache(second, 0)
    cache.free(first)
    assert (cache.num_free_slots, cache.num_freeable_slots) == (4, 4)
    assert not cache.can_allocate(second, 1, 100, 0)
    cache.free(second)
    assert cache.get_freed_mm_hashes() == []
    assert cache.can_allocate(second, 1, 100, 0)
    assert (freed(cache), freed(cache)) == (["a"], [])


def test_the_compute_budget_counts_what_is_scheduled_already() -> None:
    cache = EncoderCacheManager(6)
    request = request_with("r", "a", "c")
    assert cache.can_allocate(request, 1, 4, 0)
    assert not cache.can_allocate(request, 1, 3, 0)
    assert cache.can_allocate(request, 1, 4, 2)
    assert not cache.can_allocate(request, 1, 4, 3)


def test_what_is_evicted_and_made_anew_in_one_pass_is_not_reported() -> None:
    cache = EncoderCacheManager(5)
    old, new = request_with("r1", "a"), request_with("r2", "d")
    cache.allocate(old, 0)
    cache.free(old)
    assert cache.can_allocate(new, 0, 100, 0)
    again = request_with("r3", "a")
    cache.allocate(again, 0)
    assert cache.get_freed_mm_hashes() == []


def test_a_prompt_that_shows_an_item_twice_holds_it_until_it_is_past_both() -> None:
    cache = EncoderCacheManager(5)
    request = request_with("r", "a", "a")
    cache.allocate(request, 0)
    assert cache.check_and_update_cache(request, 1)
    cache.free_encoder_input(request, 0)
    assert cache.get_cached_input_ids(request) == {1}
    assert cache.num_freeable_slots == 3
    cache.free_encoder_input(request, 1)
    assert cache.num_freeable_slots == 5


def test_a_revoked_entry_goes_to_another_holder_or_away() -> None:
    cache = EncoderCacheManager(5)
    first, second = request_with("r1", "a"), request_with("r2", "b", "a")
    cache.allocate(first, 0)
    cache.check_and_update_cache(second, 1)
    assert cache.revoke(first, 0) == ("r2", 1)
    assert cache.revoke(second, 1) is None
    assert (cache.num_free_slots, cache.get_freed_mm_hashes()) == (5, [])


def test_a_reset_is_refused_while_an_entry_is_held() -> None:
    cache = EncoderCacheManager(5)
    request = request_with("r", "a")
    cache.allocate(request, 0)
    assert not cache.reset()
    cache.free(request)
    assert cache.reset()
    assert (cache.num_free_slots, freed(cache)) == (5, ["a"])


def test_an_allocation_without_room_is_a_broken_invariant() -> None:
    with pytest.raises(IntegrityError, match="no room for input 0"):
        EncoderCacheManager(1).allocate(request_with("r", "a"), 0)


class CacheMachine(RuleBasedStateMachine):
    """Against a plain list of entries, the one let go first in front."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCacheManager(9)
        self.requests = [request_with(f"r{index}", *hashes) for index, hashes in enumerate(("abc", "bd", "aacd"))]
        self.held: dict[str, set[tuple[str, int]]] = {}
        self.unheld: list[str] = []
        self.evicted: list[str] = []

    @rule(number=st.integers(0, 2), input_id=st.integers(0, 3), budget=st.integers(0, 9))
    def use(self, number: int, input_id: int, budget: int) -> None:
        request = self.requests[number]
        input_id %= len(request.mm_features)
        name = request.mm_features[input_id].mm_hash
        if self.cache.check_and_update_cache(request, input_id):
            assert name in self.held or name in self.unheld
            self.unheld = [other for other in self.unheld if other != name]
            self.held.setdefault(name, set()).add((request.request_id, input_id))
            return
        assert name not in self.held
        assert name not in self.unheld
        num_free = 9 - sum(SIZES[other] for other in (*self.held, *self.unheld))
        num_reachable = num_free + sum(SIZES[other] for other in self.unheld)
        can = self.cache.can_allocate(request, input_id, budget, 0)
        assert can == (SIZES[name] <= budget and SIZES[name] <= num_reachable)
        if not can:
            return
        while num_free < SIZES[name]:
            self.evicted.append(self.unheld.pop(0))
            num_free += SIZES[self.evicted[-1]]
        self.cache.allocate(request, input_id)
        self.evicted = [other for other in self.evicted if other != name]
        self.held[name] = {(request.request_id, input_id)}

    @rule(number=st.integers(0, 2), input_id=st.integers(0, 3))
    def let_go(self, number: int, input_id: int) -> None:
        request = self.requests[number]
        input_id %= len(request.mm_features)
        self.cache.free_encoder_input(request, input_id)
        self._drop(request.mm_features[input_id].mm_hash, (request.request_id, input_id))

    @rule(number=st.integers(0, 2))
    def end(self, number: int) -> None:
        request = self.requests[number]
        self.cache.free(request)
        for input_id, feature in enumerate(request.mm_features):
            self._drop(feature.mm_hash, (request.request_id, input_id))

    @precondition(lambda self: self.evicted)
    @rule()
    def tell(self) -> None:
        assert freed(self.cache) == self.evicted
        self.evicted = []

    def _drop(self, name: str, holder: tuple[str, int]) -> None:
        if holder in self.held.get(name, ()):
            self.held[name].remove(holder)
            if not self.held[name]:
                del self.held[name]
                self.unheld.append(name)

    @invariant()
    def they_agree(self) -> None:
        self.cache.check_integrity()
        for request in self.requests:
            expected = {i for holders in self.held.values() for name, i in holders if name == request.request_id}
            assert self.cache.get_cached_input_ids(request) == expected


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_one_name_with_two_sizes_has_two_entries() -> None:
    cache = EncoderCacheManager(8)
    small, large = (
        make_request(name, 50, mm_features=[MultiModalFeature("a", 0, size, size)])
        for name, size in (("x", 2), ("y", 3))
    )
    assert cache.can_allocate(small, 0, 8, 0)
    cache.allocate(small, 0)
    assert not cache.check_and_update_cache(large, 0), "the entry has two embeddings, three tokens wait for one each"
    assert cache.can_allocate(large, 0, 8, 0)
    cache.allocate(large, 0)
    cache.check_integrity()
