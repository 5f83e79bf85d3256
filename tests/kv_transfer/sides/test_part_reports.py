"""Reports of parts become reports of whole requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV, WantedPrefix
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.params import EngineAddress, TransferRole
from kv_transfer.sides.part_reports import PartReports, WantCounts, add_stats, merge_received
from kv_transfer.transfer_stats import LinkState, LinkStats, TransferStats, TransferTimings

LOADED = ReceivedKV(LoadOutcome.LOADED, 20, 7, timings=TransferTimings(2, 100, 3, 0.5, 0.1))
CANCELLED = ReceivedKV(LoadOutcome.CANCELLED, 12)
FAILED = ReceivedKV(LoadOutcome.FAILED, 8, reason="link lost")
RELEASED = ReceivedKV(LoadOutcome.RELEASED, 16)


def test_a_request_is_ready_when_its_last_part_is() -> None:
    reports = PartReports({"a": 3, "b": 1}.__getitem__)
    assert reports.add(KVConnectorOutput(ready_to_prefill={"a", "b"})) == KVConnectorOutput(ready_to_prefill={"b"})
    assert reports.add(KVConnectorOutput(ready_to_prefill={"a"})).is_empty()
    assert reports.add(KVConnectorOutput(ready_to_prefill={"a"})) == KVConnectorOutput(ready_to_prefill={"a"})


def test_the_first_failure_is_told_at_once_and_the_blocks_are_free_after_the_last_part() -> None:
    reports = PartReports(lambda _: 2)
    assert reports.add(KVConnectorOutput(failed_sending={"a": "gone"})).failed_sending == {"a": "gone"}
    assert reports.add(KVConnectorOutput(failed_sending={"a": "also gone"}, finished_sending={"a"})).is_empty()
    assert reports.add(KVConnectorOutput(finished_sending={"a"})).finished_sending == {"a"}
    # The id may come back.
    assert reports.add(KVConnectorOutput(failed_sending={"a": "gone again"})).failed_sending == {"a": "gone again"}


def test_a_load_is_over_when_every_part_is() -> None:
    reports = PartReports(lambda _: 2)
    assert reports.add(KVConnectorOutput(finished_recving={"a": LOADED})).is_empty()
    whole = reports.add(KVConnectorOutput(finished_recving={"a": LOADED})).finished_recving["a"]
    assert (whole.outcome, whole.num_valid_tokens, whole.first_token_id) == (LoadOutcome.LOADED, 20, 7)
    assert whole.timings == TransferTimings(2, 200, 3, 0.5, 0.1)


@pytest.mark.parametrize(
    ("parts", "outcome", "num_valid_tokens"),
    [
        ([LOADED, FAILED], LoadOutcome.FAILED, 8),
        ([LOADED, CANCELLED], LoadOutcome.CANCELLED, 12),
        ([CANCELLED, FAILED, LOADED], LoadOutcome.FAILED, 8),
        ([RELEASED, FAILED], LoadOutcome.RELEASED, 8),
        ([CANCELLED, RELEASED], LoadOutcome.RELEASED, 12),
    ],
)
def test_the_gravest_outcome_counts_and_what_all_parts_have(
    parts: list[ReceivedKV], outcome: LoadOutcome, num_valid_tokens: int
) -> None:
    random.Random(0).shuffle(parts)
    whole = merge_received(parts)
    assert (whole.outcome, whole.num_valid_tokens, whole.first_token_id) == (outcome, num_valid_tokens, None)


def test_counters_of_ranks_add_up() -> None:
    ranks = [
        TransferStats(num_sent_bytes=5, num_links=1, dropped_messages={"late": 1}),
        TransferStats(num_sent_bytes=7, num_links=2, dropped_messages={"late": 2, "old": 1}),
    ]
    total = add_stats(ranks)
    assert (total.num_sent_bytes, total.num_links, total.dropped_messages) == (12, 3, {"late": 3, "old": 1})
    assert ranks[0].dropped_messages == {"late": 1}


def test_ranks_stats_show_every_link_the_oldest_pin_and_times_that_still_make_a_mean() -> None:
    link = LinkStats("prefill-0/0", 1, TransferRole.CONSUMER, LinkState.OPEN, 1, 100, 50.0, 60.0, "")
    ranks = [
        TransferStats(num_pinned_blocks=3, num_timed_transfers=2, transfer_s=0.5, exposed_s=0.25, links=(link,)),
        TransferStats(num_pinned_blocks=4, num_timed_transfers=2, transfer_s=1.5, oldest_pin_at_s=70.0),
        TransferStats(links=(replace(link, peer_engine_id="prefill-0/1"),), oldest_pin_at_s=60.0),
    ]
    assert add_stats(ranks) == TransferStats(
        num_pinned_blocks=7,
        num_timed_transfers=4,
        transfer_s=2.0,
        exposed_s=0.25,
        links=(link, replace(link, peer_engine_id="prefill-0/1")),
        oldest_pin_at_s=60.0,
    )
    assert add_stats([TransferStats()]).oldest_pin_at_s is None


def test_a_load_from_stores_is_over_when_every_rank_has_reported_and_counts_what_all_have() -> None:
    reports = PartReports(lambda request_id: 2)
    assert not reports.add(KVConnectorOutput(finished_loading={"r": LoadedBlocks(5)})).finished_loading
    whole = reports.add(KVConnectorOutput(finished_loading={"r": LoadedBlocks(3, "gone")}))
    assert whole.finished_loading == {"r": LoadedBlocks(3, "gone")}


def test_a_fetch_is_heard_of_when_every_rank_has_heard_of_it() -> None:
    reports = PartReports(lambda request_id: 2)
    want = WantedPrefix("t", 0, EngineAddress("peer", 1, ""), (b"hash",), num_ranks=2)
    assert not reports.add(KVConnectorOutput(wanted_prefixes=[want])).wanted_prefixes
    assert reports.add(KVConnectorOutput(wanted_prefixes=[want])).wanted_prefixes == [want]
    assert not reports.add(KVConnectorOutput(wanted_prefixes=[want])).wanted_prefixes, "the next one of that name"


def test_fetches_whose_other_parts_never_come_are_forgotten() -> None:
    counts = WantCounts()
    for number in range(5000):
        assert not counts.is_last(f"t{number}", 2)
    assert not counts.is_last("t0", 2)
    assert counts.is_last("t4999", 2)


def test_a_part_that_fails_fails_the_load_while_others_wait() -> None:
    reports = PartReports(lambda request_id: 2)
    first = reports.add(KVConnectorOutput(finished_recving={"r": FAILED}))
    assert first.doomed_loads == {"r"}
    assert not first.is_empty(), "an idle engine has to look at it"
    last = reports.add(KVConnectorOutput(finished_recving={"r": CANCELLED}))
    assert not last.doomed_loads
    assert last.finished_recving["r"].outcome is LoadOutcome.FAILED
    assert reports.add(KVConnectorOutput(doomed_loads={"of a rank"})).doomed_loads == {"of a rank"}


def test_a_load_that_fails_in_its_last_part_needs_no_cancel() -> None:
    reports = PartReports(lambda request_id: 2)
    assert not reports.add(KVConnectorOutput(finished_recving={"r": LOADED})).doomed_loads
    assert not reports.add(KVConnectorOutput(finished_recving={"r": FAILED})).doomed_loads
