"""Reports of parts become reports of whole requests.

Tests of kv_transfer/connector/keys.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.connector.fetches import PrefixFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.params import EngineAddress, TransferRole
from kv_transfer.sides.part_reports import PartReports, WantCounts, add_stats, merge_received
from kv_transfer.transfer_stats import LinkState, LinkStats, TransferStats, TransferTimings
from tests.kv_transfer.reported import Reported, output_of

LOADED = ReceivedKV(LoadOutcome.LOADED, 20, 7, timings=TransferTimings(2, 100, 3, 0.5, 0.1))
CANCELLED = ReceivedKV(LoadOutcome.CANCELLED, 12)
FAILED = ReceivedKV(LoadOutcome.FAILED, 8, reason="link lost")
RELEASED = ReceivedKV(LoadOutcome.RELEASED, 16)


class Parts:
    """PartReports, asked for all reports of an output."""

    def __init__(self, num_parts: Callable[[TransferKey], int]) -> None:
        self._reports = PartReports(num_parts)

    def add(self, output: KVConnectorOutput) -> Reported:
        return Reported.of(
            KVConnectorOutput([whole for report in output.reports for whole in self._reports.add(report)])
        )


def test_a_request_is_ready_when_its_last_part_is() -> None:
    reports = Parts(lambda key: {"a": 3, "b": 1}[key.name])
    assert reports.add(output_of(ready_to_prefill={"a", "b"})) == Reported(ready_to_prefill={"b"})
    assert reports.add(output_of(ready_to_prefill={"a"})) == Reported()
    assert reports.add(output_of(ready_to_prefill={"a"})) == Reported(ready_to_prefill={"a"})


def test_the_first_failure_is_told_at_once_and_the_blocks_are_free_after_the_last_part() -> None:
    reports = Parts(lambda _: 2)
    assert reports.add(output_of(failed_sending={"a": "gone"})).failed_sending == {"a": "gone"}
    assert reports.add(output_of(failed_sending={"a": "also gone"}, finished_sending={"a"})) == Reported()
    assert reports.add(output_of(finished_sending={"a"})).finished_sending == {"a"}
    # The id may come back.
    assert reports.add(output_of(failed_sending={"a": "gone again"})).failed_sending == {"a": "gone again"}


def test_a_load_is_over_when_every_part_is() -> None:
    reports = Parts(lambda _: 2)
    assert reports.add(output_of(finished_recving={"a": LOADED})) == Reported()
    whole = reports.add(output_of(finished_recving={"a": LOADED})).finished_recving["a"]
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
    reports = Parts(lambda _: 2)
    assert not reports.add(Reported(finished_loading={"r": LoadedBlocks(5)}).output()).finished_loading
    whole = reports.add(Reported(finished_loading={"r": LoadedBlocks(3, "gone")}).output())
    assert whole.finished_loading == {"r": LoadedBlocks(3, "gone")}


def test_a_fetch_is_heard_of_when_every_rank_has_heard_of_it() -> None:
    reports = Parts(lambda _: 2)
    want = WantedFetch(0, EngineAddress("peer", 1, ""), PrefixFetch("t", (b"hash",)), num_ranks=2)
    assert not reports.add(output_of(wants=[want])).wants
    assert reports.add(output_of(wants=[want])).wants == [want]
    assert not reports.add(output_of(wants=[want])).wants, "the next one of that name"


def test_fetches_whose_other_parts_never_come_are_forgotten() -> None:
    counts = WantCounts()
    for number in range(5000):
        assert not counts.is_last(f"t{number}", 2)
    assert not counts.is_last("t0", 2)
    assert counts.is_last("t4999", 2)


def test_a_part_that_fails_is_reported_while_others_wait() -> None:
    reports = Parts(lambda _: 2)
    first = reports.add(output_of(finished_recving={"r": FAILED}))
    assert first.part_failed == {"r"}
    last = reports.add(output_of(finished_recving={"r": CANCELLED}))
    assert not last.part_failed
    assert last.finished_recving["r"].outcome is LoadOutcome.FAILED
    assert reports.add(Reported(part_failed={"of a rank"}).output()).part_failed == {"of a rank"}


def test_a_load_that_fails_in_its_last_part_needs_no_cancel() -> None:
    reports = Parts(lambda _: 2)
    assert not reports.add(output_of(finished_recving={"r": LOADED})).part_failed
    assert not reports.add(output_of(finished_recving={"r": FAILED})).part_failed
