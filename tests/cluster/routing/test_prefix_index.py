from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.engine_connection import EngineKey
from cluster.routing.prefix_index import PrefixIndex

HASHES = [bytes([number]) * 16 for number in range(10)]
P0, P1, P2 = ("prefill-0", 1), ("prefill-1", 1), ("decode-0", 1)


def test_each_engine_has_a_prefix_up_to_its_first_gap() -> None:
    index = PrefixIndex(100)
    index.add([P0], HASHES[:5])
    index.add([P1], HASHES[:2])
    index.add([P1], HASHES[3:5])
    assert index.find(HASHES) == {P0: 5, P1: 2}
    assert index.find(HASHES[7:]) == {}
    assert index.find([]) == {}


def test_the_next_incarnation_of_an_engine_has_nothing() -> None:
    index = PrefixIndex(100)
    index.add([P0], HASHES)
    assert ("prefill-0", 2) not in index.find(HASHES)


def test_what_is_used_least_recently_is_forgotten_from_its_end() -> None:
    index = PrefixIndex(6)
    index.add([P0], HASHES[:4])
    index.add([P1], HASHES[5:9])
    assert len(index) == 6
    assert index.find(HASHES[:4]) == {P0: 2}
    assert index.find(HASHES[5:9]) == {P1: 4}


@given(st.lists(st.tuples(st.sets(st.sampled_from([P0, P1, P2]), min_size=1), st.integers(0, 9), st.integers(0, 9))))
def test_it_knows_what_a_plain_list_of_what_was_added_knows(added: list[tuple[set[EngineKey], int, int]]) -> None:
    index = PrefixIndex(100)
    for engines, begin, end in added:
        index.add(engines, HASHES[begin:end])
    known = [{key for keys, begin, end in added if begin <= block < end for key in keys} for block in range(10)]
    lengths = {key: next((n for n, keys in enumerate(known) if key not in keys), 10) for key in (P0, P1, P2)}
    assert index.find(HASHES) == {key: length for key, length in lengths.items() if length}
