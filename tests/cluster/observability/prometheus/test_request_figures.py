"""Phases, lengths, transfers and attempts of a request are counted once, from its record.

Tests of cluster/observability/prometheus/request_figures.py and cluster/observability/prometheus/buckets.py.
"""

from __future__ import annotations

import msgspec
import pytest

from cluster.observability.prometheus import buckets, request_figures
from cluster.observability.prometheus.declaration import Declaration
from cluster.observability.prometheus.request_figures import AttemptFigures, ModelFigures
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord

PREFILL = EngineTimes(queued_s=0.25, prefill_s=0.5, num_prompt_tokens_computed=30)
DECODE = EngineTimes(0.0, 0.0, num_preemptions=2, transfer_s=0.75, exposed_transfer_s=0.125, num_transferred_bytes=4096)
HANDED_OVER = AttemptRecord(0.0, ("d0",), "p0", num_new_tokens=5, prefill=PREFILL, decode=DECODE)
ANSWERED = RequestRecord(
    "r", "", "ingress-0", 1.0, "stop", num_prompt_tokens=40, num_output_tokens=5, attempts=(HANDED_OVER,), max_tokens=9
)
SAW_NOTHING = AttemptRecord(0.0, ("d0",), "p0", failure="d0 died")
SAW_TOKENS = AttemptRecord(0.0, ("d0",), "p0", num_new_tokens=2, failure="d0 died")


def counted(record: RequestRecord, tpot_s: float | None = 0.5) -> dict[str, tuple[int, float]]:
    """How many values each histogram has, and their sum; those without values are left out."""
    figures = ModelFigures()
    figures.on_record(record, tpot_s)
    return {name: (one.count, one.sum) for name, one in figures.histograms.items() if one.count}


def test_a_request_with_an_answer_is_in_every_histogram_of_phases_and_lengths() -> None:
    assert counted(ANSWERED) == {
        "raypd_request_queue_seconds": (1, 0.25),
        "raypd_request_prefill_seconds": (1, 0.5),
        "raypd_request_decode_seconds": (1, 2.0),
        "raypd_request_time_per_output_token_seconds": (1, 0.5),
        "raypd_transfer_duration_seconds": (1, 0.75),
        "raypd_transfer_exposed_duration_seconds": (1, 0.125),
        "raypd_transfer_size_bytes": (1, 4096),
        "raypd_request_prompt_tokens": (1, 40),
        "raypd_request_output_tokens": (1, 5),
        "raypd_request_computed_prompt_tokens": (1, 30),
        "raypd_request_inference_seconds": (1, 2.5),
        "raypd_request_max_tokens": (1, 9),
    }


def test_the_preemptions_of_all_attempts_are_counted() -> None:
    figures = ModelFigures()
    figures.on_record(msgspec.structs.replace(ANSWERED, attempts=(SAW_TOKENS, HANDED_OVER)), None)
    figures.on_record(msgspec.structs.replace(ANSWERED, attempts=(HANDED_OVER, HANDED_OVER), outcome="cancelled"), None)
    assert (figures.num_preemptions, ModelFigures.merged([figures, figures]).num_preemptions) == (6, 12)


def test_a_traced_request_is_the_example_of_each_of_its_values_and_of_its_longest_gap() -> None:
    traced = msgspec.structs.replace(ANSWERED, ttft_s=0.3, itl_max_s=0.2, duration_s=4.0)
    figures = ModelFigures()
    figures.on_record(traced, 0.5)
    figures.show_trace(traced, 0.5, "a" * 32)
    shown = {
        name: [(one.value, one.timestamp) for one in each.exemplars() if one is not None]
        for name, each in figures.histograms.items()
    }
    assert shown.keys() == {one.name for one in request_figures.HISTOGRAMS}
    assert {name: values for name, values in shown.items() if len(values) != 1} == {}
    assert shown["raypd_time_to_first_token_seconds"] == [(0.3, 5.0)]
    assert shown["raypd_inter_token_latency_seconds"] == [(0.2, 5.0)]
    assert shown["raypd_request_duration_seconds"] == [(4.0, 5.0)]
    assert shown["raypd_transfer_exposed_duration_seconds"] == [(0.125, 5.0)]


def test_examples_are_as_many_as_buckets_however_many_requests_are_traced() -> None:
    figures = ModelFigures()
    for number in range(1000):
        record = msgspec.structs.replace(ANSWERED, ttft_s=number / 7, itl_max_s=number / 7, duration_s=number * 9.0)
        figures.show_trace(record, 0.5, f"{number:032x}")
    ttft = list(figures.histograms["raypd_time_to_first_token_seconds"].exemplars())
    assert len(ttft) == len(buckets.TTFT_S) + 1
    assert f"{999:032x}" in [one.labels["trace_id"] for one in ttft if one is not None]


def test_one_token_has_no_time_per_token_and_no_decode_phase() -> None:
    short = msgspec.structs.replace(ANSWERED, num_output_tokens=1)
    assert not {name for name in counted(short, tpot_s=None) if "decode" in name or "per_output" in name}
    assert counted(short, tpot_s=None)["raypd_request_inference_seconds"] == (1, 0.5)


def test_a_request_whose_client_left_counts_only_its_transfer() -> None:
    left = msgspec.structs.replace(ANSWERED, outcome="cancelled")
    assert all(name.startswith("raypd_transfer") for name in counted(left))
    assert counted(left)["raypd_transfer_duration_seconds"] == (1, 0.75)


def test_the_phases_are_those_of_the_attempt_that_gave_the_first_token() -> None:
    slow = EngineTimes(queued_s=9.0, prefill_s=9.0)
    failed = msgspec.structs.replace(SAW_NOTHING, prefill=slow)
    later = msgspec.structs.replace(HANDED_OVER, prefill=slow)
    assert counted(msgspec.structs.replace(ANSWERED, attempts=(failed, HANDED_OVER, later)))[
        "raypd_request_queue_seconds"
    ] == (1, 0.25)


def test_the_queue_that_a_request_was_rerouted_from_counts() -> None:
    left = msgspec.structs.replace(SAW_NOTHING, failure="", ended_s=2.0)
    names = counted(msgspec.structs.replace(ANSWERED, attempts=(left, HANDED_OVER)))
    assert names["raypd_request_queue_seconds"] == (1, 2.25)


def test_an_engine_that_did_all_of_it_has_no_transfer() -> None:
    alone = AttemptRecord(0.0, ("d0",), num_new_tokens=5, decode=PREFILL)
    names = counted(msgspec.structs.replace(ANSWERED, attempts=(alone,)))
    assert not [name for name in names if "transfer" in name]
    assert names["raypd_request_queue_seconds"] == (1, 0.25)


@pytest.mark.parametrize(
    ("outcome", "attempts", "num_attempts", "num_retries"),
    [
        ("stop", (HANDED_OVER,), {("decode", "completed"): 1}, {}),
        (
            "length",
            (SAW_NOTHING, SAW_TOKENS, HANDED_OVER),
            {("prefill", "retried"): 1, ("decode", "retried"): 1, ("decode", "completed"): 1},
            {("prefill", "completed"): 1, ("decode", "completed"): 1},
        ),
        (
            "failed",
            (SAW_TOKENS, SAW_NOTHING),
            {("decode", "retried"): 1, ("prefill", "failed"): 1},
            {("decode", "failed"): 1},
        ),
        (
            "stop",
            (msgspec.structs.replace(SAW_NOTHING, failure="", ended_s=1.0), HANDED_OVER),
            {("prefill", "rerouted"): 1, ("decode", "completed"): 1},
            {},
        ),
        ("deadline", (SAW_NOTHING,), {("prefill", "cancelled"): 1}, {}),
        ("cancelled", (SAW_TOKENS,), {("decode", "cancelled"): 1}, {}),
    ],
)
def test_attempts_and_retries_are_counted_by_phase_and_outcome(
    outcome: str,
    attempts: tuple[AttemptRecord, ...],
    num_attempts: dict[tuple[str, str], int],
    num_retries: dict[tuple[str, str], int],
) -> None:
    assert by_labels(msgspec.structs.replace(ANSWERED, outcome=outcome, attempts=attempts)) == (
        num_attempts,
        num_retries,
        {},
    )


def test_attempts_that_the_record_leaves_out_are_counted() -> None:
    many = msgspec.structs.replace(ANSWERED, attempts=(SAW_NOTHING, HANDED_OVER), num_attempts_left_out=7)
    assert by_labels(many)[1] == {("prefill", "completed"): 8}


def test_migrations_are_counted_by_the_phase_of_their_attempt_and_the_outcome() -> None:
    moved = msgspec.structs.replace(HANDED_OVER, decode_engine_ids=("d0", "d1", "d2"), moved_s=(1.0, 2.0))
    lost = msgspec.structs.replace(SAW_NOTHING, decode_engine_ids=("d0", "d1"), moved_s=(0.5,))
    record = msgspec.structs.replace(ANSWERED, attempts=(lost, moved))
    assert by_labels(record)[2] == {("prefill", "completed"): 1, ("decode", "completed"): 2}


def by_labels(record: RequestRecord) -> tuple[dict[tuple[str, ...], float], ...]:
    figures = AttemptFigures()
    figures.add(record)
    return tuple(
        {tuple(one.labels.values()): one.value for one in metric.samples if one.value} for metric in figures.collect()
    )


def test_buckets_ascend_and_phases_begin_at_five_milliseconds() -> None:
    histograms: tuple[Declaration, ...] = request_figures.HISTOGRAMS
    for one in histograms:
        assert list(one.buckets) == sorted(set(one.buckets)), one.name
    assert buckets.PHASE_S[0] == 0.005
    assert 2.5 in buckets.TTFT_S, "the objective of the alert RaypdFirstTokensAreSlow"
