"""The counters that came over gRPC are those that the ingress has.

Tests of cluster/commands/top/proto_totals.py, cluster/observability/live/engine_totals.py.
"""

from __future__ import annotations

import dataclasses

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.api.grpc.conversions.status_messages import status_to_proto
from cluster.commands.top.proto_totals import totals_in
from cluster.observability.live.engine_totals import EngineTotals, LinkTotals, totals_of
from cluster.observability.status import ClusterView, EngineView
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import LinkState, LinkStats, TransferStats

NOW_S = 5000.0


def _view() -> ClusterView:
    links = (
        LinkStats("decode-0", 3, TransferRole.PRODUCER, LinkState.OPEN, 2, 100, NOW_S - 9, NOW_S, ""),
        LinkStats("prefill-1", 1, TransferRole.CONSUMER, LinkState.DEAD, 1, 50, NOW_S - 9, NOW_S, "cut"),
    )
    stats = SchedulerStats(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_waiting_for_remote_kvs=3,
        num_held_reqs=4,
        num_blocks=50,
        num_free_blocks=6,
        num_preemptions=7,
        num_prompt_tokens_computed=8,
        num_output_tokens=9,
        num_steps=10,
        transfer_stats=TransferStats(links=links),
    )
    engines = (
        EngineView("both-0", 2, "both", "ready", last_error="e", node="n", stats=stats, stats_at_s=NOW_S - 0.25),
        EngineView("prefill-1", 1, "prefill", "starting"),
    )
    return ClusterView("tiny", NOW_S, 1, engines, ())


def test_every_counter_is_taken() -> None:
    links = (
        LinkTotals("both-0", "decode-0", False, "open", 2, 100),
        LinkTotals("prefill-1", "both-0", True, "dead", 1, 50, "cut"),
    )
    counted = EngineTotals("both-0", 2, "both", "ready", NOW_S - 0.25, "n", "e", 1, 2, 3, 4, 50, 6, 7, 8, 9, 10, links)
    assert list(totals_of(_view().engines)) == [counted, EngineTotals("prefill-1", 1, "prefill", "starting")]


def test_a_message_has_them_all_at_the_time_of_its_arrival() -> None:
    first, second = totals_of(_view().engines)
    assert first.at_s is not None
    moved = dataclasses.replace(first, at_s=first.at_s - NOW_S + 70.0)
    assert list(totals_in(status_to_proto(_view()), 70.0)) == [moved, second]
