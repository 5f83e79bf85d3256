"""Entries are counted as a parser would, whatever the slices are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from cluster.api.http.receiving import entries
from cluster.api.http.receiving.entries import (
    MAX_CONTAINERS,
    MAX_ENTRIES,
    MAX_SLOW_NUMBERS,
    MAX_TEXTS,
    EntryCounts,
    count_entries,
)

_TEXTS = st.text(st.sampled_from('a",[{\\é\n'), max_size=6)
_VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(_TEXTS, values, max_size=4),
    max_leaves=12,
)


def _counts(value: JsonValue) -> EntryCounts:
    """By looking at the value. The sum of commas is what all lists and objects have but one of each."""
    match value:
        case str():
            return EntryCounts(0, 1, 0)
        case list() | dict():
            inside = [_counts(one) for one in (value.values() if isinstance(value, dict) else value)]
            return EntryCounts(
                1 + sum(one.num_containers for one in inside),
                sum(one.num_texts for one in inside) + (len(value) if isinstance(value, dict) else 0),
                sum(one.num_entries for one in inside) + max(0, len(value) - 1),
            )
        case _:
            return EntryCounts()


@given(_VALUES, st.integers(1, 9), st.booleans())
def test_every_slice_size_finds_what_a_json_has(value: JsonValue, slice_bytes: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "SLICE_BYTES", slice_bytes)
        *_, last = count_entries(text)
    expected = _counts(value)
    assert (last.num_containers, last.num_texts) == (expected.num_containers, expected.num_texts)
    assert last.num_entries == expected.num_entries + 1


@pytest.mark.parametrize(
    ("counts", "allowed"),
    [
        (EntryCounts(MAX_CONTAINERS, MAX_TEXTS, MAX_ENTRIES), None),
        (EntryCounts(MAX_CONTAINERS + 1, 0, 0), "at most 32768 lists and objects"),
        (EntryCounts(0, MAX_TEXTS + 1, 0), "at most 131072 strings, names of fields included"),
        (EntryCounts(0, 0, MAX_ENTRIES + 1), "at most 524288 entries of lists and objects"),
        (EntryCounts(0, 0, 0, MAX_SLOW_NUMBERS, 64), None),
        (EntryCounts(0, 0, 0, MAX_SLOW_NUMBERS + 1), "at most 16384 numbers with fractions, exponents or many digits"),
        (EntryCounts(0, 0, 0, 0, 65), "at most 64 characters of a number"),
    ],
)
def test_one_too_many_of_each_kind_is_too_much(counts: EntryCounts, allowed: str | None) -> None:
    excess = counts.excess()
    assert excess is None if allowed is None else excess is not None and excess[1] == allowed, excess


@pytest.mark.parametrize(
    ("text", "num_slow_numbers", "longest_number"),
    [
        (b'[1,22,-333,"4444.4e4"]', 0, 4),
        (b"[1.5,2e7,3.5E-1,true,false,null]", 4, 6),
        (b"[123456789012345678,1234567890123456789]", 1, 19),
        (b'{"1.5":"1.5","a\\"1.5":0.5}', 1, 3),
        (b"7" * 1000, 1, 1000),
    ],
)
def test_numbers_that_are_slow_to_parse_are_counted(text: bytes, num_slow_numbers: int, longest_number: int) -> None:
    *_, counts = count_entries(text)
    assert (counts.num_slow_numbers, counts.longest_number) == (num_slow_numbers, longest_number)
