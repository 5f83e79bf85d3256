from __future__ import annotations

from kv_transfer.link_load import MAX_LINK_LOADS, LinkLoad, merge_link_loads


def test_links_of_several_ranks_to_one_engine_are_one_link() -> None:
    loads = [LinkLoad("decode-0", 100, 2e6, 0.001), LinkLoad("decode-1", 300), LinkLoad("decode-0", 50, 3e6, 0.002)]
    assert merge_link_loads(loads) == (LinkLoad("decode-1", 300), LinkLoad("decode-0", 150, 5e6, 0.002))


def test_the_busiest_links_are_reported_where_there_are_too_many() -> None:
    loads = [LinkLoad(f"decode-{number}", number, 1.0) for number in range(MAX_LINK_LOADS + 10)]
    assert merge_link_loads(loads) == tuple(reversed(loads[10:]))


def test_among_idle_links_those_that_are_named_first_are_reported() -> None:
    loads = [LinkLoad(f"decode-{number}") for number in range(MAX_LINK_LOADS + 10)]
    assert merge_link_loads(loads) == tuple(loads[:MAX_LINK_LOADS])
