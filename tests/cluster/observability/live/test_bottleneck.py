"""The cause that is named in words, for queues of every kind."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.observability.live.bottleneck import Bottleneck, BottleneckKind, find_bottleneck, gb_per_s
from cluster.observability.live.engine_totals import EngineTotals
from cluster.observability.live.live_rates import LiveRates
from tests.cluster.observability.live.engines import link, totals

IDLE_P, IDLE_D = totals("prefill-0"), totals("decode-0", running=8)


def _found(*engines: EngineTotals) -> Bottleneck:
    return find_bottleneck(LiveRates().update(engines))


def test_nothing_is_named_where_nothing_waits() -> None:
    assert _found(IDLE_P, IDLE_D) == Bottleneck(BottleneckKind.NOTHING)


def test_a_queue_at_prefill_engines_is_named_with_the_longest_first() -> None:
    found = _found(totals("prefill-0", waiting=2, running=4), totals("prefill-1", waiting=5, running=4), IDLE_D)
    assert (found.kind, found.num_requests, found.where) == (
        BottleneckKind.PREFILL_QUEUE,
        7,
        ("prefill-1", "prefill-0"),
    )
    assert found.text.startswith("Prefill queue: 7 requests wait for prefill at prefill-1, prefill-0.")


def test_full_caches_of_decode_engines_are_named_although_their_requests_wait_for_prefill_as_well() -> None:
    found = _found(totals("prefill-0", waiting=6), totals("decode-0", waiting=6, running=9, free=2))
    assert (found.kind, found.num_requests, found.where) == (BottleneckKind.DECODE_BLOCKS, 6, ("decode-0",))
    assert "98% full" in found.text


@pytest.mark.parametrize(
    ("running", "free", "kind"),
    [(4, 8, BottleneckKind.DECODE_BLOCKS), (64, 8, BottleneckKind.DECODE_SLOTS), (1, 60, BottleneckKind.DECODE_SLOTS)],
    ids=["less than one of them has", "room for several", "half empty"],
)
def test_a_cache_without_room_for_one_more_like_those_in_it_is_full(
    running: int, free: int, kind: BottleneckKind
) -> None:
    """Preempted requests waited beside 8 % of free blocks, of which each one needed more."""
    assert _found(IDLE_P, totals("decode-0", waiting=4, running=running, free=free)).kind is kind


def test_a_cache_that_is_full_of_requests_without_kv_is_the_fault_of_prefill() -> None:
    found = _found(totals("prefill-0", waiting=40), totals("decode-0", waiting=10, running=2, for_kv=30, free=0))
    assert found.kind is BottleneckKind.PREFILL_QUEUE


def test_requests_whose_kv_does_not_leave_name_the_link() -> None:
    engines = (
        totals("prefill-0", held=3, links=(link(0, is_of_consumer=False, active=3),)),
        totals("decode-0", for_kv=3, links=(link(0, active=3),)),
    )
    found = _found(*engines)
    assert (found.kind, found.num_requests, found.where) == (BottleneckKind.LINK, 3, ("prefill-0", "decode-0"))
    assert found.text == (
        "Link: 3 requests wait for the transfer of their KV after prefill. The link with the most transfers, prefill-0 "
        "to decode-0, has 3."
    )


def test_the_link_is_named_with_its_rate() -> None:
    rates = LiveRates()
    for at_s, num_bytes in [(0.0, 0), (1.0, 2_000_000)]:
        engines = (totals("prefill-0", at_s, held=1), totals("decode-0", at_s, links=(link(num_bytes, active=1),)))
        live = rates.update(engines)
    found = find_bottleneck(live)
    assert found.text.startswith("Link: 1 request waits")
    assert found.text.endswith("has 1 at 2.0 MB/s.")


def test_a_link_that_fills_the_cache_of_prefill_is_the_cause_and_not_the_queue_behind_it() -> None:
    found = _found(totals("prefill-0", waiting=20, held=12, running=1, free=0), IDLE_D)
    assert (found.kind, found.num_requests) == (BottleneckKind.LINK, 32)


def test_waiting_beside_free_blocks_is_for_slots() -> None:
    found = _found(IDLE_P, totals("decode-0", waiting=4, running=256))
    assert (found.kind, found.num_requests) == (BottleneckKind.DECODE_SLOTS, 4)


@pytest.mark.parametrize("engines", [(), (IDLE_P,), (IDLE_P, dataclasses.replace(IDLE_D, state="dead"))])
def test_engines_that_are_missing_come_first(engines: tuple[EngineTotals, ...]) -> None:
    assert _found(*engines).kind is BottleneckKind.NO_ENGINE


def test_long_lists_of_engines_are_counted() -> None:
    engines = [totals(f"prefill-{number}", waiting=1) for number in range(5)]
    assert "prefill-0, prefill-1, prefill-2 and 2 more" in _found(*engines, IDLE_D).text


@pytest.mark.parametrize(("rate", "text"), [(2.5e9, "2.50 GB/s"), (1e8, "0.10 GB/s"), (1.5e6, "1.5 MB/s")])
def test_rates_have_a_unit_that_suits_them(rate: float, text: str) -> None:
    assert gb_per_s(rate) == text
