from __future__ import annotations

import math

import pytest

from cluster.bench.summary import Failure, summarise
from tests.cluster.bench.runs import load_result, record


def test_figures_are_over_complete_requests() -> None:
    """By hand: TTFT 0.5 and 1; TPOT 0.5 and 0.75; gaps 0.25, 0.75, 0.5, 1; E2EL 1.5 and 2.5."""
    records = [
        record(0, 0.5, 0.75, 1.5, num_tokens=3),
        record(1, 1.0, 1.5, 2.5, num_tokens=3),
        record(2, 3.0, num_tokens=1, error="cut off"),
        record(3, error="HTTP 429"),
        record(4, error="HTTP 429"),
    ]
    summary = summarise(load_result(records), [50.0, 90.0])
    metrics = {
        name: (one.num_values, one.mean.value, one.percentiles[50.0].value, round(one.percentiles[90.0].value, 9))
        for name, one in summary.metrics.items()
    }
    assert metrics == {
        "ttft": (2, 0.75, 0.75, 0.95),
        "tpot": (2, 0.625, 0.625, 0.725),
        "itl": (4, 0.625, 0.625, 0.925),
        "e2el": (2, 2.0, 2.0, 2.4),
    }
    assert (summary.num_completed, summary.num_failed) == (2, 3)
    assert summary.failures == {"HTTP 429": Failure(2, "said of 3"), "cut off": Failure(1, "said of 2")}
    assert (summary.num_input_tokens, summary.num_output_tokens) == (16, 6)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 1.5, 5.5)


def test_goodput_counts_requests_that_met_the_objectives() -> None:
    records = [record(0, 0.5, 0.75, num_tokens=2), record(1, 1.0, 1.25, num_tokens=2), record(2, error="timeout")]
    goodput = summarise(load_result(records), [50.0], {"ttft": 0.5}).goodput
    assert goodput is not None
    assert (goodput.num_good, goodput.per_s, goodput.share) == (1, 0.25, 1 / 3)
    assert summarise(load_result(records), [50.0]).goodput is None


def test_events_with_several_tokens_and_answers_of_other_lengths_are_told() -> None:
    records = [record(0, 1.0, 2.0, num_tokens=6), record(1, 1.0, 2.0, num_tokens=3), record(2, 1.0)]
    summary = summarise(load_result(records), [50.0])
    assert summary.tokens_per_event == 9 / 4
    assert (summary.num_other_lengths, summary.num_uncounted) == (1, 1)
    assert summary.num_output_tokens == 10, "an event counts as a token where the server counted none"


def test_a_single_token_counts_in_no_tpot() -> None:
    summary = summarise(load_result([record(0, 1.0, num_tokens=1), record(1, 1.0, 3.0, num_tokens=2)]), [50.0])
    assert (summary.metrics["tpot"].num_values, summary.metrics["tpot"].mean.value) == (1, 2.0)
    assert summary.metrics["ttft"].num_values == 2


def test_waiting_for_a_slot_is_a_metric_of_its_own() -> None:
    held_back = record(0, 1.0, num_tokens=1)
    held_back.due_s = held_back.sent_s = 100.25
    summary = summarise(load_result([held_back]), [50.0])
    assert summary.metrics["client_queue_time"].mean.value == 0.25
    assert summary.metrics["ttft"].mean.value == 0.75
    assert "client_queue_time" not in summarise(load_result([record(0, 1.0)]), [50.0]).metrics


@pytest.mark.parametrize(
    ("late_s", "lag_s", "is_late"), [(0.0, [0.0] * 9, False), (0.5, [0.0] * 9, True), (0.0, [0.5] * 9, True)]
)
def test_a_generator_that_was_too_slow_is_told(late_s: float, lag_s: list[float], is_late: bool) -> None:
    sent = record(0, 1.0, num_tokens=1)
    sent.sent_s += late_s
    generator = summarise(load_result([sent], lag_s=lag_s), [50.0]).generator
    assert generator.is_late is is_late
    assert (generator.lateness_max_s, generator.lag_max_s) == (late_s, max(lag_s))
    assert (generator.cpu_share, generator.cpu_per_token_s) == (0.125, 0.5)


def test_a_run_in_which_everything_failed_has_no_figures() -> None:
    summary = summarise(load_result([record(0, error="HTTP 500")]), [50.0], {"ttft": 1.0})
    assert (summary.num_completed, summary.num_failed, summary.output_tokens_per_s) == (0, 1, 0.0)
    assert math.isnan(summary.metrics["ttft"].mean.value)
    assert math.isnan(summary.tokens_per_event)
