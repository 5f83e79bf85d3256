"""Makes metrics of every engine, from its newest counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from prometheus_client.metrics_core import Metric

from actors.core.outputs.scheduler_stats import WAIT_REASONS, SchedulerStats
from actors.core.outputs.step_stats import STEP_SECONDS, STEP_TOKENS, StepStats
from actors.core.requests.structured_output import COMPILE_FAILURES
from cluster.observability.prometheus.bounded_names import OTHER
from cluster.observability.prometheus.declaration import Declaration, counter, gauge, histogram
from cluster.observability.prometheus.histogram import Histogram
from cluster.observability.status import EngineView

_LABELS: Final = ("engine", "role")
_MAX_POSITIONS: Final = 16
_MAX_KINDS: Final = 64

Values: TypeAlias = Mapping[tuple[str, ...], float] | float | None
"""One series' value, or those of several series by further labels; None if the engine has no such figure."""


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """A metric with a series, or several, for each engine. values: reads them from the engine's counters"""

    declaration: Declaration
    values: Callable[[SchedulerStats], Values]


def _counted(
    name: str, meaning: str, values: Callable[[SchedulerStats], Values], *labels: str, unit: str = ""
) -> EngineFigure:
    return EngineFigure(counter(name, meaning, *_LABELS, *labels, unit=unit), values)


def _gauged(
    name: str, meaning: str, values: Callable[[SchedulerStats], Values], *labels: str, unit: str = ""
) -> EngineFigure:
    return EngineFigure(gauge(name, meaning, *_LABELS, *labels, unit=unit), values)


def _requests(stats: SchedulerStats) -> Values:
    return {
        ("running",): stats.num_running_reqs,
        ("waiting",): stats.num_waiting_reqs,
        ("waiting_for_remote_kvs",): stats.num_waiting_for_remote_kvs,
        ("held",): stats.num_held_reqs,
    }


def _waits(stats: SchedulerStats) -> Values:
    values: dict[tuple[str, ...], float] = {(why,): stats.num_waiting_by_reason.get(why, 0) for why in WAIT_REASONS}
    return values | {("turn",): max(0, stats.num_waiting_reqs - sum(values.values()))}


def _loaded(stats: SchedulerStats) -> Values:
    prefixes = stats.prefix_cache_stats
    return {("store",): max(0, prefixes.loaded - prefixes.fetched), ("engine",): prefixes.fetched}


def _steps(stats: SchedulerStats) -> Values:
    return {("replayed",): stats.num_replayed_steps, ("eager",): stats.num_steps - stats.num_replayed_steps}


def _stores(name: str) -> Callable[[SchedulerStats], Values]:
    return lambda stats: None if stats.store_stats is None else float(getattr(stats.store_stats, name))


def _store_blocks(stats: SchedulerStats) -> Values:
    stores = stats.store_stats
    if stores is None:
        return None
    return {
        ("saved",): stores.num_saved_blocks,
        ("unsaved",): stores.num_unsaved_blocks,
        ("loaded",): stores.num_loaded_blocks,
        ("missing",): stores.num_missing_blocks,
    }


def _drafts(name: str) -> Callable[[SchedulerStats], Values]:
    return lambda stats: None if stats.spec_decoding_stats is None else float(getattr(stats.spec_decoding_stats, name))


def _accepted_by_position(stats: SchedulerStats) -> Values:
    drafts = stats.spec_decoding_stats
    if drafts is None:
        return None
    # An engine tells as many positions as it drafts tokens; the bound holds for any message.
    return {(str(at),): number for at, number in enumerate(drafts.num_accepted_tokens_per_pos[:_MAX_POSITIONS])}


def _adapters(stats: SchedulerStats) -> Values:
    return None if stats.adapter_stats is None else len(stats.adapter_stats.loaded)


def _adapters_waiting(stats: SchedulerStats) -> Values:
    return None if stats.adapter_stats is None else stats.adapter_stats.num_waiting_reqs


def _adapter_changes(stats: SchedulerStats) -> Values:
    adapters = stats.adapter_stats
    if adapters is None:
        return None
    return {
        ("loaded",): adapters.num_loads,
        ("failed",): adapters.num_failed_loads,
        ("evicted",): adapters.num_evictions,
    }


def _grammars(name: str) -> Callable[[SchedulerStats], Values]:
    return lambda stats: None if stats.grammar_stats is None else float(getattr(stats.grammar_stats, name))


def _grammar_failures(stats: SchedulerStats) -> Values:
    grammars = stats.grammar_stats
    return None if grammars is None else {(why,): grammars.num_failed.get(why, 0) for why in COMPILE_FAILURES}


def _images(stats: SchedulerStats) -> Values:
    images = stats.embedding_stats
    if images is None:
        return None
    return {
        ("received",): images.num_received,
        ("failed",): images.num_failed,
        ("sent",): images.num_sent,
        ("not_sent",): images.num_not_sent,
    }


def _refused(stats: SchedulerStats) -> Values:
    # An engine tells few kinds; the bound holds for any message.
    counted = sorted(stats.all_refused_messages.items())
    values: dict[tuple[str, ...], float] = {(kind,): count for kind, count in counted[:_MAX_KINDS]}
    return (
        values if len(counted) <= _MAX_KINDS else values | {(OTHER,): sum(count for _, count in counted[_MAX_KINDS:])}
    )


def _prediction_errors(stats: SchedulerStats) -> Values:
    costs = stats.step_costs
    return None if costs is None else {(one.kind,): one.median_size for one in costs.residuals if one.num_steps}


FIGURES: Final = (
    _gauged(
        "raypd_engine_requests",
        "Requests that the engine has, by their state in its scheduler. held: finished, but a transfer still needs "
        "their blocks.",
        _requests,
        "state",
    ),
    _gauged(
        "raypd_engine_waiting_requests",
        'raypd_engine_requests{state="waiting"} by what they wait for. turn: other requests come first; reservation: '
        "the decode engine has no room for their KV yet; load: too many loads of KV are under way; prefix: it is on "
        "its way here for another request; batch: their KV has arrived, and the batch is full; grammar: it is being "
        "compiled; adapter: its weights are loaded; adapter_slot: the batch has as many adapters as it may.",
        _waits,
        "reason",
    ),
    _gauged(
        "raypd_engine_kv_cache_usage_ratio",
        "Part of the KV cache's blocks that requests hold, 0 to 1.",
        lambda stats: stats.kv_cache_usage,
    ),
    _gauged("raypd_engine_kv_cache_blocks", "Blocks of the engine's KV cache.", lambda stats: stats.num_blocks),
    _gauged(
        "raypd_engine_kv_cache_free_blocks",
        "Blocks that no request holds; those that only the prefix cache keeps are among them.",
        lambda stats: stats.num_free_blocks,
    ),
    _counted(
        "raypd_engine_prompt_tokens_total",
        "Prompt tokens that the engine has computed.",
        lambda stats: stats.num_prompt_tokens_computed,
    ),
    _counted(
        "raypd_engine_output_tokens_total",
        "Output tokens that the engine has generated.",
        lambda stats: stats.num_output_tokens,
    ),
    _counted(
        "raypd_engine_preemptions_total",
        "Preemptions: a running request lost its blocks to another one.",
        lambda stats: stats.num_preemptions,
    ),
    _counted(
        "raypd_engine_steps_total", "Steps, replayed (CUDA graph or compiled) or run eagerly.", _steps, "execution"
    ),
    _counted(
        "raypd_engine_late_completions_total",
        "Completions that came late, twice or for an unknown request, and were dropped.",
        lambda stats: stats.num_late_completions,
    ),
    _counted(
        "raypd_engine_refused_handoffs_total",
        "Handoffs refused because of the order of the two engines' handoff ranks.",
        lambda stats: stats.num_refused_handoffs,
    ),
    _counted(
        "raypd_engine_prefix_queried_tokens_total",
        "Prompt tokens looked up in the engine's prefix cache.",
        lambda stats: stats.prefix_cache_stats.queries,
    ),
    _counted(
        "raypd_engine_prefix_cached_tokens_total",
        "Prompt tokens found in the prefix cache; they are part of raypd_engine_prefix_queried_tokens_total.",
        lambda stats: stats.prefix_cache_stats.hits,
    ),
    _counted(
        "raypd_engine_prefix_loaded_tokens_total",
        "Prompt tokens whose KV came from a store, or from another engine's prefix cache.",
        _loaded,
        "source",
    ),
    _counted(
        "raypd_engine_refused_connections_total",
        "Connections refused because the other end did not prove the cluster's secret.",
        lambda stats: stats.num_refused_connections,
    ),
    _counted(
        "raypd_engine_refused_messages_total",
        "Messages from other processes of the cluster that the engine refused or dropped, by kind.",
        _refused,
        "kind",
    ),
    _gauged(
        "raypd_engine_step_prediction_error_ratio",
        "Median of |measured / predicted - 1| of the durations of the newest steps, by kind of steps.",
        _prediction_errors,
        "kind",
    ),
    _counted("raypd_engine_drafts_total", "Drafts that speculative decoding has made.", _drafts("num_drafts")),
    _counted(
        "raypd_engine_draft_tokens_total",
        "Tokens that speculative decoding has drafted.",
        _drafts("num_draft_tokens"),
    ),
    _counted(
        "raypd_engine_accepted_draft_tokens_total",
        "Drafted tokens that the model accepted.",
        _drafts("num_accepted_tokens"),
    ),
    _counted(
        "raypd_engine_accepted_draft_tokens_by_position_total",
        f"Drafted tokens that the model accepted, by their position in the draft, the first {_MAX_POSITIONS}.",
        _accepted_by_position,
        "position",
    ),
    _gauged("raypd_engine_adapters", "LoRA adapters that are loaded.", _adapters),
    _gauged("raypd_engine_adapter_waiting_requests", "Requests that wait for their adapter.", _adapters_waiting),
    _counted(
        "raypd_engine_adapter_changes_total",
        "LoRA adapters loaded, failed to load, and evicted.",
        _adapter_changes,
        "change",
    ),
    _counted(
        "raypd_engine_store_blocks_total",
        "KV blocks that the engine's stores have saved, could not save, have loaded, and lacked.",
        _store_blocks,
        "result",
    ),
    _counted(
        "raypd_engine_store_loaded_bytes_total",
        "Bytes of KV that were loaded from stores.",
        _stores("num_loaded_bytes"),
        unit="bytes",
    ),
    _counted(
        "raypd_engine_store_load_seconds_total", "Time that loads from stores have taken.", _stores("load_s"), unit="s"
    ),
    _counted(
        "raypd_engine_grammar_compiles_total",
        "Grammars of structured output that the engine has compiled.",
        _grammars("num_compiled"),
    ),
    _counted(
        "raypd_engine_grammar_compile_failures_total",
        "Compilations of grammars that failed. reason: wrong (the compiler refuses the grammar), too_slow or too_large "
        "(it takes too much time or memory), no_compiler (the compiler or the tokenizer cannot be used).",
        _grammar_failures,
        "reason",
    ),
    _counted(
        "raypd_engine_grammar_cached_total",
        "Requests whose grammar, or its refusal, was known from a compilation before.",
        _grammars("num_cached"),
    ),
    _counted(
        "raypd_engine_grammar_compile_seconds_total",
        "Time that compilations of grammars have taken, failed ones included.",
        _grammars("compile_s"),
        unit="s",
    ),
    _counted(
        "raypd_engine_image_embeddings_total",
        "Images whose embeddings came from an encode engine, failed to come, were sent to others, and were not sent.",
        _images,
        "result",
    ),
)
"""Everything that is a number in SchedulerStats; transfer_figures.py has the transfers."""

STEP_DURATION: Final = histogram(
    "raypd_engine_step_seconds",
    "Duration of steps that computed tokens, by role.",
    *_LABELS,
    unit="s",
    buckets=STEP_SECONDS,
)
STEP_SIZE: Final = histogram(
    "raypd_engine_step_tokens", "Tokens of one step.", *_LABELS, unit="tokens", buckets=STEP_TOKENS
)
INFO: Final = gauge(
    "raypd_engine_info",
    "1 for each engine, with facts about it as labels.",
    *_LABELS,
    *("incarnation", "model_version", "dtype", "block_size", "kv_transport", "attention_backend", "node"),
)
DECLARATIONS: Final = (*(one.declaration for one in FIGURES), STEP_DURATION, STEP_SIZE, INFO)


def newest(engines: Iterable[EngineView]) -> list[EngineView]:
    """Return one view for each engine id, that of its newest incarnation with counters, ordered by id."""
    found: dict[str, EngineView] = {}
    for engine in engines:
        known = found.get(engine.engine_id)
        if known is None or (engine.stats is not None, engine.incarnation) > (
            known.stats is not None,
            known.incarnation,
        ):
            found[engine.engine_id] = engine
    return [found[name] for name in sorted(found)]


def collect_engines(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """Yield the metrics of engines. engines: as newest() returns them"""
    yield INFO.of((_facts(engine), 1.0) for engine in engines)
    counted = [(engine, engine.stats) for engine in engines if engine.stats is not None]
    for figure in FIGURES:
        yield figure.declaration.of(_series(figure.values, counted))
    stepped = [(engine, stats.step_stats) for engine, stats in counted if stats.step_stats is not None]
    yield STEP_DURATION.histograms((_labels(engine), _durations(steps)) for engine, steps in stepped)
    yield STEP_SIZE.histograms((_labels(engine), _sizes(steps)) for engine, steps in stepped)


def _series(
    read: Callable[[SchedulerStats], Values], engines: Iterable[tuple[EngineView, SchedulerStats]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for engine, stats in engines:
        values, labels = read(stats), _labels(engine)
        if isinstance(values, Mapping):
            yield from (((*labels, *further), value) for further, value in values.items())
        elif values is not None:
            yield labels, values


def _labels(engine: EngineView) -> tuple[str, str]:
    return engine.engine_id, engine.role


def _facts(engine: EngineView) -> tuple[str, ...]:
    block_size = "" if engine.stats is None else str(engine.stats.block_size)
    return (
        *_labels(engine),
        str(engine.incarnation),
        str(engine.model_version),
        engine.dtype,
        block_size,
        engine.kv_transport,
        engine.attention_backend,
        engine.node,
    )


def _durations(steps: StepStats) -> Histogram:
    return Histogram.of(STEP_SECONDS, steps.num_by_duration, steps.duration_s)


def _sizes(steps: StepStats) -> Histogram:
    return Histogram.of(STEP_TOKENS, steps.num_by_size, steps.num_tokens)
