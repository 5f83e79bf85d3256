"""Makes metrics of the KV transfers of every engine, from its newest counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import Metric

from cluster.observability.prometheus.declaration import Declaration, counter, gauge
from cluster.observability.prometheus.engine_figures import Values
from cluster.observability.status import EngineView
from kv_transfer.transfer_stats import TransferFailure, TransferStats

_LABELS: Final = ("engine", "role")


@dataclass(frozen=True, slots=True)
class _TransferFigure:
    """A metric of transfers. values: reads them from an engine's counters and the Unix time in seconds"""

    declaration: Declaration
    values: Callable[[TransferStats, float], Values]


def _counted(
    name: str,
    meaning: str,
    values: Callable[[TransferStats], Values],
    *labels: str,
    unit: str = "",
    replaced_by: str = "",
) -> _TransferFigure:
    declaration = counter(name, meaning, *_LABELS, *labels, unit=unit, replaced_by=replaced_by)
    return _TransferFigure(declaration, lambda stats, now_s: values(stats))


def _gauged(name: str, meaning: str, values: Callable[[TransferStats], Values]) -> _TransferFigure:
    return _TransferFigure(gauge(name, meaning, *_LABELS), lambda stats, now_s: values(stats))


def _outcomes(stats: TransferStats) -> Values:
    return {
        ("completed",): stats.num_transfers_completed,
        ("failed",): stats.num_transfers_failed,
        ("cancelled",): stats.num_transfers_cancelled,
    }


def _failures(stats: TransferStats) -> Values:
    return {(one.value,): stats.failures.get(one.value, 0) for one in TransferFailure}


def _bytes(stats: TransferStats) -> Values:
    return {("sent",): stats.num_sent_bytes, ("received",): stats.num_received_bytes}


def _age_of_oldest_pin(stats: TransferStats, now_s: float) -> Values:
    return 0.0 if stats.oldest_pin_at_s is None else max(0.0, now_s - stats.oldest_pin_at_s)


_FIGURES: Final = (
    _counted("raypd_transfers_total", "KV transfers that have ended, by outcome.", _outcomes, "outcome"),
    _counted(
        "raypd_transfer_failures_total",
        "KV transfers that have failed, as this end saw it. no_reservation: the decode engine did not reserve blocks "
        "in time; consumer_cancelled: it did not want the KV any more; producer_gave_up; link_lost; corrupt: a chunk's "
        "checksum was wrong; repeated_id: two requests had one id.",
        _failures,
        "reason",
    ),
    _counted(
        "raypd_transfer_bytes_total",
        "Bytes of KV that the engine has sent and received.",
        _bytes,
        "direction",
        unit="bytes",
    ),
    _gauged("raypd_transfers_active", "KV transfers under way.", lambda stats: stats.num_active_transfers),
    _gauged("raypd_links", "Links to other engines.", lambda stats: stats.num_links),
    _gauged(
        "raypd_transfer_pinned_blocks",
        "Blocks that KV transfers keep from being freed.",
        lambda stats: stats.num_pinned_blocks,
    ),
    _counted(
        "raypd_transfer_seconds_total",
        "Total duration of the KV transfers of handoffs.",
        lambda stats: stats.transfer_s,
        unit="s",
        replaced_by="raypd_transfer_duration_seconds",
    ),
    _counted(
        "raypd_transfer_exposed_seconds_total",
        "Part of raypd_transfer_seconds_total that prefill did not hide.",
        lambda stats: stats.exposed_s,
        unit="s",
        replaced_by="raypd_transfer_exposed_duration_seconds",
    ),
    _counted(
        "raypd_timed_transfers_total",
        "KV transfers whose duration is in raypd_transfer_seconds_total.",
        lambda stats: stats.num_timed_transfers,
        replaced_by="raypd_transfer_duration_seconds",
    ),
    _counted(
        "raypd_transfer_retries_total",
        "KV transfers that were begun for a request that had been submitted before.",
        lambda stats: stats.num_retries,
    ),
    _counted(
        "raypd_links_lost_total", "Links that ended while transfers were on them.", lambda stats: stats.num_links_lost
    ),
    _counted(
        "raypd_transfer_stalls_total",
        "Chunks of KV that made no progress before their deadline.",
        lambda stats: stats.num_stalls,
    ),
    _counted(
        "raypd_transfer_corrupt_chunks_total",
        "Chunks of KV whose checksum differed from the producer's.",
        lambda stats: stats.num_corrupt_chunks,
    ),
    _TransferFigure(
        gauge(
            "raypd_transfer_oldest_pin_seconds",
            "Time for which the oldest KV transfer has kept blocks from being freed.",
            *_LABELS,
            unit="s",
        ),
        _age_of_oldest_pin,
    ),
)
DECLARATIONS: Final = tuple(one.declaration for one in _FIGURES)


def collect_transfers(engines: Sequence[EngineView], now_s: float) -> Iterator[Metric]:
    """Yield the metrics of transfers. engines: one view of each; now_s: Unix time"""
    for figure in _FIGURES:
        yield figure.declaration.of(_series(figure, engines, now_s))


def _series(
    figure: _TransferFigure, engines: Sequence[EngineView], now_s: float
) -> Iterator[tuple[tuple[str, ...], float]]:
    for engine in engines:
        stats = None if engine.stats is None else engine.stats.transfer_stats
        if stats is None:
            continue
        values, labels = figure.values(stats, now_s), (engine.engine_id, engine.role)
        if isinstance(values, Mapping):
            yield from (((*labels, *further), value) for further, value in values.items())
        elif values is not None:
            yield labels, values
