"""Each engine's counters become series of that engine, once, and bounded in number.

Tests of cluster/observability/prometheus/engine_figures.py and cluster/observability/prometheus/transfer_figures.py.
"""

from __future__ import annotations

from dataclasses import replace

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.outputs.step_stats import StepStats
from cluster.observability.prometheus.engine_figures import collect_engines, newest
from cluster.observability.prometheus.transfer_figures import collect_transfers
from cluster.observability.status import EngineView
from kv_transfer.transfer_stats import TransferStats
from tests.cluster.observability.exposed import STATS

DECODE = EngineView("decode-0", 2, "decode", "ready", kv_transport="tcp", node="n", dtype="bfloat16", stats=STATS)


def series(*engines: EngineView) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in [*collect_engines(engines), *collect_transfers(engines, 100.0)]:
        for sample in metric.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_counters_become_series_with_the_engine_and_its_role() -> None:
    found = series(DECODE)
    engine = ("decode-0", "decode")
    assert found["raypd_engine_requests"][*engine, "running"] == 3
    assert found["raypd_engine_steps_total"] == {(*engine, "replayed"): 60, (*engine, "eager"): 40}
    assert found["raypd_engine_prefix_loaded_tokens_total"] == {(*engine, "store"): 3, (*engine, "engine"): 2}
    assert found["raypd_engine_accepted_draft_tokens_by_position_total"] == {(*engine, "0"): 44, (*engine, "1"): 19}
    assert found["raypd_engine_adapter_changes_total"][*engine, "evicted"] == 6
    assert found["raypd_engine_store_blocks_total"][*engine, "saved"] == 9
    assert found["raypd_engine_image_embeddings_total"][*engine, "not_sent"] == 19
    assert found["raypd_engine_info"] == {(*engine, "2", "1", "bfloat16", "16", "tcp", "", "n"): 1}
    assert found["raypd_engine_grammar_compiles_total"] == {engine: 8}
    assert found["raypd_engine_grammar_compile_failures_total"] == {
        (*engine, why): 2 * (why == "wrong") for why in ("wrong", "too_slow", "too_large", "no_compiler")
    }
    assert found["raypd_engine_grammar_cached_total"] == {engine: 31}
    assert found["raypd_engine_grammar_compile_seconds_total"] == {engine: 1.5}
    assert found["raypd_transfer_oldest_pin_seconds"] == {engine: 61}
    assert found["raypd_transfer_seconds_total"] == {engine: 0.5}


def test_steps_are_histograms_of_the_engine() -> None:
    steps = StepStats()
    steps.add(0.004, 3)
    steps.add(20.0, 100_000)
    found = series(replace(DECODE, stats=replace(STATS, step_stats=steps)))
    buckets = found["raypd_engine_step_seconds_bucket"]
    assert (buckets["decode-0", "decode", "0.0025"], buckets["decode-0", "decode", "0.005"]) == (0, 1)
    assert (buckets["decode-0", "decode", "10.0"], buckets["decode-0", "decode", "+Inf"]) == (1, 2)
    assert found["raypd_engine_step_tokens_sum"]["decode-0", "decode"] == 100_003


def test_an_engine_without_a_feature_has_no_series_of_it() -> None:
    found = series(replace(DECODE, stats=SchedulerStats()))
    assert not {
        name
        for name in found
        if "draft" in name or "store" in name or "adapter" in name or "image" in name or "grammar" in name
    }
    assert found["raypd_engine_preemptions_total"] == {("decode-0", "decode"): 0}


def test_an_engine_that_has_told_nothing_yet_has_only_its_facts() -> None:
    assert set(series(replace(DECODE, stats=None))) == {"raypd_engine_info"}


def test_two_incarnations_of_an_engine_are_one_series() -> None:
    old, new = replace(DECODE, incarnation=1), replace(DECODE, incarnation=2, stats=replace(STATS, num_blocks=7))
    starting = replace(DECODE, incarnation=3, stats=None)
    assert newest([new, starting, old]) == [new]
    assert newest([starting]) == [starting]


def test_an_engine_cannot_make_up_any_number_of_series() -> None:
    kinds = {f"kind {number:04}": 1 for number in range(1000)}
    stats = replace(STATS, refused_messages=kinds, transfer_stats=TransferStats())
    stats.spec_decoding_stats = replace(STATS.spec_decoding_stats, num_accepted_tokens_per_pos=[1] * 1000)  # type: ignore[type-var]  # it is set
    found = series(replace(DECODE, stats=stats))
    refused = found["raypd_engine_refused_messages_total"]
    assert len(refused) == 65
    assert refused["decode-0", "decode", "other"] == 936
    assert len(found["raypd_engine_accepted_draft_tokens_by_position_total"]) == 16
