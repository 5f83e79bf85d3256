"""Shares of ways, regret and errors of predictions, over a window and since the start, for one ingress and for all."""

from __future__ import annotations

import msgspec
import pytest

from cluster.observability.metrics import ServingMetrics
from cluster.observability.prometheus.routing_metrics import metrics_of_routing
from cluster.observability.routing_figures import RoutingFigures, RoutingSummary, merged
from cluster.routing.request_record import RequestRecord
from tests.cluster.routing.record_samples import ALONE, attempt, decision, record


def figures(*records: RequestRecord, now_s: float = 1000.0) -> RoutingSummary:
    one = RoutingFigures()
    for each in records:
        one.add(each, now_s)
    return one.summary(now_s)


def test_the_shares_of_ways_are_counted_by_the_first_decision() -> None:
    alone = attempt(why=decision(ALONE))
    summary = figures(record(), record(alone, attempt()), record(attempt(why=decision(None))), record())
    assert summary.num_requests == 4
    assert summary.requests_by_way == {"prefill_decode": 2, "decode_alone": 1, "fixed_rule": 1}


def test_the_regret_is_the_ratio_of_the_sums_of_costs() -> None:
    worse = attempt(why=decision(without_roles_s=0.5))
    summary = figures(record(), record(worse))
    assert summary.regret == pytest.approx((2.0 + 2.0) / (2.5 + 0.5))


def test_requests_without_predicted_costs_are_no_part_of_the_regret() -> None:
    summary = figures(record(), record(attempt(why=decision(None))), record(attempt(why=decision(without_roles_s=0))))
    assert summary.regret == pytest.approx(2.0 / 2.5)
    assert figures(record(attempt(why=decision(None)))).regret is None


def test_the_median_error_of_the_first_token_is_known_to_five_percent() -> None:
    # 0.5 s were predicted.
    summary = figures(*(record(ttft_s=ttft_s) for ttft_s in (0.5, 0.6, 0.7, 5.0, 0.65)))
    assert summary.ttft_error == pytest.approx(0.3, rel=0.06)
    assert figures().ttft_error is None


def test_a_request_whose_first_attempt_failed_before_its_first_token_counts_for_no_error() -> None:
    failed = msgspec.structs.replace(attempt(), num_new_tokens=0)
    summary = figures(record(failed, attempt()))
    assert (summary.ttft_error, summary.num_requests) == (None, 1)


def test_an_enormous_error_is_counted_as_the_largest() -> None:
    assert figures(record(ttft_s=1e6)).ttft_error == pytest.approx(10, rel=0.1)


def test_what_is_older_than_the_window_counts_only_since_the_start() -> None:
    one = RoutingFigures()
    one.add(record(), now_s=0.0)
    one.add(record(attempt(why=decision(ALONE))), now_s=299.0)
    assert one.summary(299.0).num_requests == 2
    late = one.summary(301.0)
    assert (late.num_requests, late.requests_by_way) == (1, {"decode_alone": 1})
    assert late.regret == pytest.approx(2.5 / 2.5)
    assert late.regret_since_start == pytest.approx(4.5 / 5.0)
    assert one.summary(10_000.0).num_requests == 0


def test_the_window_is_bounded_in_memory() -> None:
    one = RoutingFigures()
    for second in range(0, 10_000, 10):
        one.add(record(), float(second))
    assert len(one._slices) <= 10


def test_the_figures_of_all_ingresses_are_the_sums_of_theirs() -> None:
    many = [figures(record()), figures(record(attempt(why=decision(ALONE)))), RoutingSummary()]
    both = merged(many)
    assert both.requests_by_way == {"prefill_decode": 1, "decode_alone": 1}
    assert both.regret == pytest.approx(4.5 / 5.0)
    assert merged([]) == RoutingSummary()


def test_a_record_without_attempts_counts_for_nothing() -> None:
    assert figures(msgspec.structs.replace(record(), attempts=())) == RoutingSummary()


def met(has_met: bool | None) -> RequestRecord:
    return msgspec.structs.replace(record(), has_met_aims=has_met)


def test_goodput_is_the_requests_that_met_their_aims_per_second() -> None:
    one = RoutingFigures()
    for number, has_met in enumerate([True, True, False, None, True]):
        one.add(met(has_met), now_s=1000.0 + number)
    summary = one.summary(1010.0)
    assert summary.aims_met == 0.75
    assert summary.goodput_per_s == pytest.approx(0.3)
    assert merged([summary, summary]).goodput_per_s == pytest.approx(0.6)
    assert (one.summary(2000.0).aims_met, one.summary(2000.0).since_start.num_met_aims) == (None, 3)
    assert (figures(met(None)).aims_met, figures(met(None)).goodput_per_s) == (None, None)


def test_over_the_whole_window_goodput_is_what_came_within_it() -> None:
    one = RoutingFigures()
    for second in range(1000):
        one.add(met(True), now_s=float(second))
    assert one.summary(1000.0).goodput_per_s == pytest.approx(1.0, rel=0.1)


def test_the_metrics_count_requests_with_aims_and_those_that_met_them() -> None:
    families = {family.name: family for family in metrics_of_routing(figures(met(True), met(False), met(None)))}
    assert families["raypd_requests_with_aims"].samples[0].value == 2
    assert families["raypd_requests_aims_met"].samples[0].value == 1


def test_the_metrics_have_the_sums_and_the_definition_of_regret() -> None:
    families = {family.name: family for family in metrics_of_routing(figures(record()))}
    ways = {sample.labels["way"]: sample.value for sample in families["raypd_routed_requests"].samples}
    assert ways == {"decode_alone": 0, "prefill_decode": 1, "prefill_alone": 0, "fixed_rule": 0}
    assert families["raypd_routing_cost_seconds"].samples[0].value == 2.0
    assert families["raypd_routing_cost_without_roles_seconds"].samples[0].value == 2.5
    assert families["raypd_routing_regret_ratio"].samples[0].value == 0.8
    help_text = families["raypd_routing_regret_ratio"].documentation
    assert (
        "raypd_routing_cost_seconds_total / raypd_routing_cost_without_roles_seconds_total over the last 300 s"
        in help_text
    )
    assert families["raypd_ttft_prediction_error_ratio"].samples[0].value == pytest.approx(1.0, rel=0.06)


def test_without_predictions_no_regret_and_no_error_are_exported() -> None:
    names = {family.name for family in ServingMetrics().collect()}
    assert "raypd_routed_requests" in names
    assert names.isdisjoint({"raypd_routing_regret_ratio", "raypd_ttft_prediction_error_ratio"})
