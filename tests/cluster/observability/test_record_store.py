"""The store keeps the last records within its bounds, whatever their size and their names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.observability.record_store import RecordStore
from tests.cluster.routing.record_samples import attempt, record


def kept(store: RecordStore) -> list[tuple[str, str]]:
    return [(one.tenant, one.request_id) for one in store.items()]


def test_the_oldest_record_makes_room_for_a_new_one() -> None:
    store = RecordStore(2, 1 << 20)
    for name in "abc":
        store.put(record(request_id=name))
    assert kept(store) == [("", "b"), ("", "c")]
    assert len(store) == 2


def test_bytes_are_bounded_whatever_the_number_of_records() -> None:
    large = record(*[attempt()] * 16)
    store = RecordStore(1000, 3 * (len(large.to_bytes()) + 400))
    for number in range(10):
        store.put(record(*large.attempts, request_id=str(number)))
    assert kept(store) == [("", "7"), ("", "8"), ("", "9")]


def test_a_record_that_is_larger_than_the_store_is_not_kept() -> None:
    store = RecordStore(10, 500)
    store.put(record())
    assert (len(store), store.size_bytes) == (0, 0)


def test_a_request_that_reuses_an_id_replaces_the_record_of_the_earlier_one() -> None:
    store = RecordStore(10, 1 << 20)
    for one in (record(ttft_s=1.0), record(request_id="other"), record(ttft_s=2.0)):
        store.put(one)
    assert [(one.request_id, one.data == record(ttft_s=2.0).to_bytes()) for one in store.items()] == [
        ("other", False),
        ("r", True),
    ]


def test_tenants_have_records_of_their_own_under_the_same_id() -> None:
    store = RecordStore(10, 1 << 20)
    store.put(record(tenant="a"))
    store.put(record(tenant="b"))
    assert kept(store) == [("a", "r"), ("b", "r")]


def test_a_store_of_no_records_keeps_none() -> None:
    store = RecordStore(0, 1 << 20)
    store.put(record())
    assert (store.is_off, len(store)) == (True, 0)


def test_records_are_numbered_in_the_order_of_the_ends() -> None:
    store = RecordStore(2, 1 << 20)
    for name in "abac":
        store.put(record(request_id=name))
    assert [(one.number, one.request_id) for one in store.items()] == [(3, "a"), (4, "c")]
    assert [one.number for one in store.newest()] == [4, 3]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 16)), max_size=40),
    st.integers(0, 5),
    st.integers(0, 20_000),
)
def test_the_bounds_hold_after_any_sequence(puts: list[tuple[str, int]], max_records: int, max_bytes: int) -> None:
    store = RecordStore(max_records, max_bytes)
    for name, num_attempts in puts:
        store.put(record(*[attempt()] * num_attempts, request_id=name))
        assert len(store) <= max_records
        assert store.size_bytes <= max_bytes
        assert sum(len(one.data) for one in store.items()) <= store.size_bytes
        assert bool(len(store)) == bool(store.size_bytes)
