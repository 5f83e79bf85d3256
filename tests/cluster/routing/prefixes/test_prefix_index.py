"""Tests of cluster/routing/prefixes/prefix_index.py and cluster/routing/prefixes/holder_sets.py."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.requests.block_hash import BlockHash
from cluster.routing.engine_connection import EngineKey
from cluster.routing.prefixes.holder_sets import HolderSets
from cluster.routing.prefixes.prefix_index import MAX_ENGINE_BLOCKS, BlockKeys, PrefixIndex

HASHES = [bytes([number + 1]) * 16 for number in range(10)]
P0, P1, P2 = ("prefill-0", 1), ("prefill-1", 1), ("decode-0", 1)


class Clock:
    """A clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keys(hashes: Sequence[BlockHash]) -> BlockKeys:
    return np.frombuffer(b"".join(block_hash[:8] for block_hash in hashes), "<u8")


def positions(begin: int, end: int) -> npt.NDArray[np.uint32]:
    return np.arange(begin, end, dtype=np.uint32)


def hashes_of(prompt: int, num_blocks: int) -> list[BlockHash]:
    return [blake2b(f"{prompt} {block}".encode(), digest_size=16).digest() for block in range(num_blocks)]


def tidy(index: PrefixIndex) -> None:
    while index.tidy():
        pass


def snapshot(index: PrefixIndex, engine: EngineKey, hashes: Sequence[BlockHash]) -> None:
    index.begin_snapshot(engine)
    index.store(engine, keys(hashes), positions(0, len(hashes)))
    index.end_snapshot(engine)


def test_each_engine_has_a_prefix_up_to_its_first_gap() -> None:
    index = PrefixIndex()
    index.add([P0], HASHES[:5])
    index.add([P1], HASHES[:2])
    index.store(P1, keys(HASHES[3:5]), positions(3, 5))
    assert index.find(HASHES) == {P0: 5, P1: 2}
    assert index.find(HASHES[7:]) == {}
    assert index.find([]) == {}


def test_an_engine_with_states_has_a_prefix_up_to_its_last_state_and_nothing_is_guessed() -> None:
    index = PrefixIndex(2**18)
    index.note_engine(P0, 80, has_states=True)
    index.note_engine(P1, 20_000)
    assert index.has_states
    assert index.stride > 1, "which would leave out the blocks where states are"
    snapshot(index, P0, [])
    index.add([P0, P1], HASHES[:4])
    index.store(P0, keys([HASHES[2], HASHES[6]]), np.array([2, 6], dtype=np.uint32))
    found = index.find(HASHES)
    assert (found.length_of(P0), found.longest) == (7, 7)
    assert index.find(HASHES[:6]).length_of(P0) == 3
    assert next(found.longest_first()) == (P0, 7)
    index.discard(P0, keys([HASHES[6]]))
    assert index.find(HASHES).length_of(P0) == 3
    index.forget_engine(P0)
    assert (index.find(HASHES).length_of(P0), index.has_states) == (0, False)


def test_the_next_incarnation_of_an_engine_has_nothing() -> None:
    index = PrefixIndex()
    index.add([P0], HASHES)
    assert ("prefill-0", 2) not in index.find(HASHES)


def test_what_is_used_least_recently_is_forgotten_from_its_end() -> None:
    index = PrefixIndex(2**18)
    index.note_engine(P0, 80)
    first, second, third = (hashes_of(prompt, 50) for prompt in range(3))
    index.add([P0], first)
    index.add([P0], second)
    index.add([P0], first)
    index.add([P1], third)
    assert len(index) == 116, "a quarter more than the engine has, and 16"
    assert index.find(first) == {P0: 50}
    assert index.find(second) == {P0: 16}
    assert index.find(third) == {P1: 50}


def test_it_keeps_as_many_blocks_as_the_engines_have_together() -> None:
    prompts = [hashes_of(prompt, 500) for prompt in range(200)]
    small, large = PrefixIndex(), PrefixIndex()
    for number in range(2):
        small.note_engine((f"e-{number}", 1), 6_600)
    for number in range(16):
        large.note_engine((f"e-{number}", 1), 6_600)
    for prompt in prompts:
        small.add([P0], prompt)
        large.add([P0], prompt)
    assert small.find(prompts[0]) == {}
    assert len(small) < 2 * 6_600 * 3
    assert large.find(prompts[0]) == {P0: 500}
    assert large.stride == small.stride == 1


def test_the_stride_grows_as_the_bound_requires_and_an_answer_is_a_multiple_of_it() -> None:
    index = PrefixIndex(2**20)
    index.note_engine(P0, 20_000)
    stride = index.stride
    assert stride == 4
    prompt = hashes_of(0, 30)
    index.add([P0], prompt)
    assert index.find(prompt) == {P0: 28}
    assert index.find(prompt[:27]) == {P0: 24}
    assert index.find(prompt[:3]) == {}
    assert len(index) == 7
    index.forget_engine(P0)
    assert index.stride == stride, "the engine may come back"


def test_the_stride_shrinks_once_twice_as_many_blocks_as_there_are_would_fit() -> None:
    index = PrefixIndex(2**20)
    engines = [(f"e-{number}", 1) for number in range(4)]
    for engine in engines:
        index.note_engine(engine, 5_000)
    strides = [index.stride]
    for engine in engines[:3]:
        index.forget_engine(engine)
        strides.append(index.stride)
        index.note_engine((engine[0], 2), 5_000)
        strides.append(index.stride)
        index.forget_engine((engine[0], 2))
    # 7 371 blocks fit.
    assert strides == [4, 4, 4, 4, 4, 2, 2]
    prompt = hashes_of(0, 30)
    index.add([engines[3]], prompt)
    assert index.find(prompt[:27]) == {engines[3]: 26}


def test_one_engines_claim_of_a_huge_cache_counts_up_to_a_limit() -> None:
    honest, one_lies = PrefixIndex(), PrefixIndex()
    honest.note_engine(P0, MAX_ENGINE_BLOCKS)
    one_lies.note_engine(P0, 2**62)
    assert one_lies.stride == honest.stride == 1


@pytest.mark.parametrize(("megabytes", "stride"), [(144, 1), (48, 4)])
def test_a_million_blocks_stay_below_the_bound_as_they_are_measured(megabytes: int, stride: int) -> None:
    max_bytes = megabytes << 20
    tracemalloc.start()
    try:
        index = PrefixIndex(max_bytes)
        generator = np.random.default_rng(1)
        for number in range(31):
            engine = (f"engine-{number}", 1)
            index.note_engine(engine, 33_000)
            index.store(
                engine,
                generator.integers(0, 2**64, 33_000, np.uint64),
                generator.integers(0, 1000, 33_000, np.uint32),
            )
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = index.size
    assert size.stride == stride
    assert size.num_blocks * stride > 1_000_000
    assert taken < max_bytes
    assert taken * 0.9 < size.size_bytes < max_bytes


def test_many_different_sets_of_engines_stay_below_the_bound() -> None:
    max_bytes = 1 << 20
    index = PrefixIndex(max_bytes)
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 2**64, 2000, np.uint64)
    tracemalloc.start()
    try:
        for number in range(400):
            part = blocks[generator.random(2000) < 0.5]
            index.store((f"engine-{number}", 1), part, np.zeros(len(part), np.uint32))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < max_bytes
    assert index.size.size_bytes < max_bytes


def test_sets_of_holders_are_the_same_object_until_nobody_uses_them() -> None:
    sets = HolderSets(1 << 20)
    one, other = sets.take(0b110, 0b010), sets.take(0b110, 0b010)
    assert one is not None
    assert one is other
    sets.release(one)
    sets.release(one)
    assert sets.size_bytes == 0


def test_without_room_only_sets_of_one_engine_are_made() -> None:
    sets = HolderSets(0)
    assert sets.take(0b101, 0) is None
    assert sets.take(0b100, 0) is not None


def test_what_an_engine_reports_as_removed_it_has_no_longer() -> None:
    index = PrefixIndex()
    index.add([P0, P1], HASHES)
    index.discard(P0, keys(HASHES[6:]))
    assert index.find(HASHES) == {P0: 6, P1: 10}
    index.discard(P1, keys(HASHES[6:]))
    assert len(index) == 6


def test_a_guess_about_an_engine_that_reports_lasts_for_a_time_unless_the_engine_reports_the_blocks() -> None:
    clock = Clock()
    index = PrefixIndex(clock=clock, guess_timeout_s=60.0)
    snapshot(index, P0, [])
    index.add([P0, P1], HASHES)
    index.store(P0, keys(HASHES[:4]), positions(0, 4))
    clock.now_s = 59.0
    tidy(index)
    assert index.find(HASHES) == {P0: 10, P1: 10}
    clock.now_s = 60.0
    tidy(index)
    assert index.find(HASHES) == {P0: 4, P1: 10}, "P1 does not report, so what it was sent is all that is known"


def test_guesses_that_take_too_much_memory_are_forgotten_early() -> None:
    index = PrefixIndex(2**20, clock=Clock())
    snapshot(index, P0, [])
    for prompt in range(200):
        index.add([P0], hashes_of(prompt, 100))
    assert index.find(hashes_of(0, 100)) == {}
    assert index.find(hashes_of(199, 100)) == {P0: 100}
    assert index.size.size_bytes < 2**20


def test_a_snapshot_replaces_what_was_known_once_it_is_whole() -> None:
    index = PrefixIndex()
    snapshot(index, P0, HASHES[:8])
    index.begin_snapshot(P0)
    index.store(P0, keys(HASHES[:2]), positions(0, 2))
    assert index.find(HASHES) == {P0: 8}
    index.store(P0, keys(HASHES[2:3]), positions(2, 3))
    index.discard(P0, keys(HASHES[1:2]))
    index.store(P0, keys(HASHES[1:2]), positions(1, 2))
    index.end_snapshot(P0)
    assert index.find(HASHES) == {P0: 3}
    tidy(index)
    assert len(index) == 3


def test_a_request_that_is_sent_while_a_snapshot_comes_in_counts_after_it() -> None:
    index = PrefixIndex()
    index.begin_snapshot(P0)
    index.add([P0], HASHES)
    index.end_snapshot(P0)
    assert index.find(HASHES) == {P0: 10}


def test_an_engine_that_left_is_gone_at_once_and_its_blocks_are_removed_in_slices() -> None:
    index = PrefixIndex()
    for number in range(40):
        index.add([P0, P1] if number % 2 else [P0], hashes_of(number, 1000))
    index.forget_engine(P0)
    assert index.find(hashes_of(0, 1000)) == {}
    assert index.find(hashes_of(1, 1000)) == {P1: 1000}
    assert index.tidy(), "one call does not visit everything"
    assert len(index) > 20_000
    tidy(index)
    assert len(index) == 20_000
    index.add([P2], HASHES)
    assert index.find(hashes_of(1, 1000)) == {P1: 1000}, "the next engine does not inherit the blocks"
    index.add([P0], HASHES)
    assert index.find(HASHES) == {P2: 10}, "a request that ends late does not bring an engine back"


@given(st.lists(st.tuples(st.sets(st.sampled_from([P0, P1, P2]), min_size=1), st.integers(0, 9), st.integers(0, 9))))
def test_it_knows_what_a_plain_list_of_what_was_added_knows(added: list[tuple[set[EngineKey], int, int]]) -> None:
    index = PrefixIndex()
    for engines, begin, end in added:
        index.add(engines, HASHES[begin:end])
    known = [{key for keys, begin, end in added if begin <= block < end for key in keys} for block in range(10)]
    lengths = {key: next((n for n, keys in enumerate(known) if key not in keys), 10) for key in (P0, P1, P2)}
    assert index.find(HASHES) == {key: length for key, length in lengths.items() if length}


class IndexBesideSets(RuleBasedStateMachine):
    """Engines store and remove the ends of prompts; a plain set for each engine says what the index has to know."""

    num_engine_blocks = 100

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(2**18)
        self.engines = [P0, P1, P2]
        for engine in self.engines:
            self.index.note_engine(engine, self.num_engine_blocks)
        self.blocks: dict[EngineKey, set[BlockHash]] = {engine: set() for engine in self.engines}
        self.incoming: dict[EngineKey, set[BlockHash]] = {}

    prompts = st.integers(0, 2).map(lambda prompt: hashes_of(prompt, 20))
    engine_numbers = st.integers(0, 2)

    def _write(self, engine: EngineKey, hashes: Sequence[BlockHash]) -> None:
        (self.incoming if engine in self.incoming else self.blocks)[engine] |= set(hashes)

    @rule(number=engine_numbers, prompt=prompts, begin=st.integers(0, 19), num_blocks=st.integers(1, 20))
    def store(self, number: int, prompt: list[BlockHash], begin: int, num_blocks: int) -> None:
        engine = self.engines[number]
        begin = min(begin, self._length(self.incoming.get(engine, self.blocks[engine]), prompt))
        hashes = prompt[begin : begin + num_blocks]
        self.index.store(engine, keys(hashes), positions(begin, begin + len(hashes)))
        self._write(engine, hashes)

    @rule(numbers=st.sets(engine_numbers, min_size=1), prompt=prompts, num_blocks=st.integers(1, 20))
    def add(self, numbers: set[int], prompt: list[BlockHash], num_blocks: int) -> None:
        self.index.add([self.engines[number] for number in numbers], prompt[:num_blocks])
        for number in numbers:
            self.blocks[self.engines[number]] |= set(prompt[:num_blocks])
            if self.engines[number] in self.incoming:
                self.incoming[self.engines[number]] |= set(prompt[:num_blocks])

    @rule(number=engine_numbers, prompt=prompts, num_kept=st.integers(0, 19))
    def discard(self, number: int, prompt: list[BlockHash], num_kept: int) -> None:
        self.index.discard(self.engines[number], keys(prompt[num_kept:]))
        self.blocks[self.engines[number]] -= set(prompt[num_kept:])
        if self.engines[number] in self.incoming:
            self.incoming[self.engines[number]] -= set(prompt[num_kept:])

    @rule(number=engine_numbers)
    def begin_snapshot(self, number: int) -> None:
        self.index.begin_snapshot(self.engines[number])
        self.incoming[self.engines[number]] = set()

    @precondition(lambda self: self.incoming)
    @rule(draw=st.integers(0, 2))
    def end_snapshot(self, draw: int) -> None:
        engine = list(self.incoming)[draw % len(self.incoming)]
        self.index.end_snapshot(engine)
        self.blocks[engine] = self.incoming.pop(engine)

    @rule(number=engine_numbers)
    def replace_engine(self, number: int) -> None:
        gone = self.engines[number]
        self.index.forget_engine(gone)
        self.incoming.pop(gone, None)
        del self.blocks[gone]
        self.engines[number] = engine = (gone[0], gone[1] + 1)
        self.index.note_engine(engine, self.num_engine_blocks)
        self.blocks[engine] = set()

    @rule()
    def tidy(self) -> None:
        self.index.tidy()

    @staticmethod
    def _length(blocks: set[BlockHash], prompt: list[BlockHash]) -> int:
        return next((number for number, block in enumerate(prompt) if block not in blocks), len(prompt))

    @invariant()
    def answers_are_exact_or_less_than_a_stride_too_small(self) -> None:
        stride = self.index.stride
        for number in range(3):
            prompt = hashes_of(number, 20)
            lengths = {engine: self._length(blocks, prompt) for engine, blocks in self.blocks.items()}
            found = self.index.find(prompt)
            assert found == {engine: n - n % stride for engine, n in lengths.items() if n >= stride}


class CoarseIndexBesideSets(IndexBesideSets):
    """The index never says more than the sets know, where the bytes allow only every k-th block."""

    num_engine_blocks = 2500


TestIndexBesideSets = IndexBesideSets.TestCase
TestCoarseIndexBesideSets = CoarseIndexBesideSets.TestCase
TestIndexBesideSets.settings = TestCoarseIndexBesideSets.settings = settings(max_examples=25, deadline=None)
