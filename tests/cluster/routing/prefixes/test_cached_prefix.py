from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.engine_connection import EngineKey
from cluster.routing.prefixes.cached_prefix import CachedPrefix


def found(lengths: dict[int, int]) -> tuple[CachedPrefix, dict[EngineKey, int]]:
    """lengths: of each engine's prefix, by the position of its bit; returns the same as a dictionary, too."""
    levels = [
        (length, sum(1 << (position - 1) for position, own in lengths.items() if own == length))
        for length in sorted(set(lengths.values()))
    ]
    slots = {(f"both-{position}", 1): 1 << (position - 1) for position in range(1, 101)}
    names = {position: (f"both-{position}", 1) for position in range(1, 101)}
    plain = {names[position]: length for position, length in lengths.items()}
    return CachedPrefix(levels, slots, names), plain


@given(st.dictionaries(st.integers(1, 100), st.integers(1, 5)))
def test_it_says_what_a_dictionary_would(lengths: dict[int, int]) -> None:
    cached, plain = found(lengths)
    assert cached == plain
    assert (len(cached), bool(cached), cached.longest) == (len(plain), bool(plain), max(plain.values(), default=0))
    assert cached.times(16) == {engine: 16 * length for engine, length in plain.items()}
    assert all(cached.length_of(engine) == plain.get(engine, 0) for engine in [*plain, ("both-1", 1), ("gone", 1)])
    assert cached.get(("gone", 1)) is None


@given(st.dictionaries(st.integers(1, 100), st.integers(1, 5)))
def test_the_longest_come_first_and_of_equal_ones_the_oldest_or_the_newest(lengths: dict[int, int]) -> None:
    cached, _ = found(lengths)
    by_age = sorted(lengths, key=lambda position: (-lengths[position], position))
    assert list(cached.longest_first()) == [((f"both-{one}", 1), lengths[one]) for one in by_age]
    newest = sorted(lengths, key=lambda position: (-lengths[position], -position))
    assert [engine for engine, _ in islice(cached.longest_first(is_newest_first=True), 2)] == [
        (f"both-{one}", 1) for one in newest[:2]
    ]


def test_without_engines_nothing_is_cached() -> None:
    assert CachedPrefix() == {}
    assert not CachedPrefix()
    assert repr(CachedPrefix()) == "CachedPrefix({})"


@given(st.dictionaries(st.integers(1, 100), st.integers(1, 5)), st.dictionaries(st.integers(1, 110), st.integers(0, 5)))
def test_some_engines_can_have_other_lengths(lengths: dict[int, int], others: dict[int, int]) -> None:
    cached, plain = found(lengths)
    changed = {(f"both-{position}", 1): length for position, length in others.items()}
    known = {engine: length for engine, length in changed.items() if int(engine[0].partition("-")[2]) <= 100}
    expected = {engine: length for engine, length in (plain | known).items() if length}
    assert cached.but_for(changed) == expected
    assert cached.but_for(changed).longest == max(expected.values(), default=0)
    assert cached == plain
