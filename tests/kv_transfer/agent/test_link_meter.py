from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.agent import link_meter
from kv_transfer.agent.link_meter import LinkMeter
from kv_transfer.link_load import MAX_LINK_LOADS, LinkLoad

MIB = 1 << 20


def meter_of(*names: str) -> LinkMeter:
    meter = LinkMeter()
    for name in names:
        meter.queue(name, name, 0)
    return meter


def bandwidth(meter: LinkMeter) -> float:
    return meter.loads()[0].bytes_per_s


def test_the_first_chunk_gives_the_bandwidth() -> None:
    meter = meter_of("d")
    assert meter.loads() == (LinkLoad("d"),)
    meter.on_chunk_sent("d", 8 * MIB, 2.0, was_computed=True)
    assert bandwidth(meter) == 4 * MIB


def test_the_bandwidth_follows_a_link_that_becomes_slower() -> None:
    meter = meter_of("d")
    for _ in range(50):
        meter.on_chunk_sent("d", MIB, 0.01, was_computed=True)
    assert bandwidth(meter) == pytest.approx(100 * MIB)
    for _ in range(50):
        meter.on_chunk_sent("d", MIB, 0.1, was_computed=True)
    assert bandwidth(meter) == pytest.approx(10 * MIB, rel=0.01)


def test_small_chunks_hardly_change_what_large_ones_have_measured() -> None:
    meter = meter_of("d")
    for _ in range(20):
        meter.on_chunk_sent("d", 8 * MIB, 0.08, was_computed=True)
        meter.on_chunk_sent("d", 1024, 0.001, was_computed=True)
    assert bandwidth(meter) == pytest.approx(100 * MIB, rel=0.05)


def test_a_chunk_that_waited_for_its_computation_only_raises_the_bandwidth() -> None:
    meter = meter_of("d")
    meter.on_chunk_sent("d", MIB, 0.1, was_computed=False)
    assert bandwidth(meter) == pytest.approx(10 * MIB)
    meter.on_chunk_sent("d", MIB, 0.1, was_computed=True)
    meter.on_chunk_sent("d", MIB, 10.0, was_computed=False)
    assert bandwidth(meter) == pytest.approx(10 * MIB)
    meter.on_chunk_sent("d", 2 * MIB, 0.1, was_computed=False)
    assert bandwidth(meter) > 10 * MIB


def test_a_shorter_round_trip_counts_at_once_and_a_longer_one_slowly() -> None:
    meter = meter_of("d")
    seen = []
    for seconds in (0.004, 0.001, 0.101):
        meter.on_round_trip("d", seconds)
        seen.append(meter.loads()[0].round_trip_s)
    assert seen == pytest.approx([0.004, 0.001, 0.006])


def test_bytes_are_queued_and_taken_off_for_each_peer() -> None:
    meter = meter_of("d/0", "d/1")
    meter.queue("d/0", "d", 300)
    meter.queue("e", "e", 100)
    meter.queue("d/0", "d", -200)
    assert meter.loads() == (LinkLoad("d/0", 100), LinkLoad("e", 100), LinkLoad("d/1"))


def test_figures_of_strangers_and_of_chunks_without_a_time_are_ignored() -> None:
    meter = meter_of("d")
    meter.on_chunk_sent("x", MIB, 1.0, was_computed=True)
    meter.on_round_trip("x", 1.0)
    meter.on_chunk_sent("d", MIB, 0.0, was_computed=True)
    meter.on_chunk_sent("d", 0, 1.0, was_computed=True)
    assert meter.loads() == (LinkLoad("d"),)


def test_peers_without_work_are_forgotten_before_the_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_meter, "_MAX_PEERS", 2)
    meter = LinkMeter()
    meter.queue("a", "a", 10)
    for name in "bcd":
        meter.queue(name, name, 0)
    assert meter.loads() == (LinkLoad("d"), LinkLoad("a", 10))


def test_no_more_links_are_reported_than_a_report_may_have() -> None:
    meter = meter_of(*map(str, range(MAX_LINK_LOADS + 5)))
    assert [load.peer for load in meter.loads()] == [str(number) for number in range(MAX_LINK_LOADS + 4, 4, -1)]


def test_loads_are_made_anew_only_for_what_has_changed() -> None:
    meter = meter_of("d", "e")
    before = meter.loads()
    assert meter.loads() is before
    changes: list[Callable[[], None]] = [
        lambda: meter.queue("d", "d", 10),
        lambda: meter.on_chunk_sent("d", MIB, 1.0, was_computed=True),
        lambda: meter.on_round_trip("d", 0.001),
    ]
    for change in changes:
        change()
        after = meter.loads()
        assert after[0].peer == "d"
        assert after != before
        assert after[1] is next(load for load in before if load.peer == "e")
        before = after
