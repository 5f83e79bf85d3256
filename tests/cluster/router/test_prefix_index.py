from __future__ import annotations

from cluster.router.prefix_index import PrefixIndex

HASHES = [bytes([number]) * 16 for number in range(10)]
P0, P1 = ("prefill-0", 1), ("prefill-1", 1)


def test_each_engine_has_a_prefix_up_to_its_first_gap() -> None:
    index = PrefixIndex(100)
    index.add(P0, HASHES[:5])
    index.add(P1, HASHES[:2])
    index.add(P1, HASHES[3:5])
    assert index.find(HASHES) == {P0: 5, P1: 2}
    assert index.find(HASHES[7:]) == {}
    assert index.find([]) == {}


def test_the_next_life_of_an_engine_has_nothing() -> None:
    index = PrefixIndex(100)
    index.add(P0, HASHES)
    assert ("prefill-0", 2) not in index.find(HASHES)


def test_what_is_used_least_recently_is_forgotten_from_its_end() -> None:
    index = PrefixIndex(6)
    index.add(P0, HASHES[:4])
    index.add(P1, HASHES[5:9])
    assert len(index) == 6
    assert index.find(HASHES[:4]) == {P0: 2}
    assert index.find(HASHES[5:9]) == {P1: 4}
