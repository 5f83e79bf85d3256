"""Writes the result of a benchmark as JSON: everything that is needed to plot it later."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from cluster.bench.estimates import CONFIDENCE, INTERVALS_SAID, NUM_RESAMPLES, Distribution
from cluster.bench.load import LoadResult
from cluster.bench.objectives import GOODPUT_SAID
from cluster.bench.pairs import Comparison
from cluster.bench.record import RequestRecord
from cluster.bench.summary import DEFINITIONS, Summary
from cluster.errors import InvalidConfig

SCHEMA: Final = "raypd-bench/1"
"""The name and the version of the document's form. Fields may be added; another meaning is another version."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of the document. label: which server; pair: the number of its pair, or None"""

    label: str
    pair: int | None
    seed: int
    result: LoadResult
    summary: Summary


def document_of(
    created: str,
    options: Mapping[str, object],
    servers: Sequence[Mapping[str, object]],
    runs: Sequence[MeasuredRun],
    comparisons: Mapping[str, Comparison],
) -> dict[str, object]:
    """Return the document. Times are in seconds; write_document() writes NaN as null.

    created: the date and the time
    options: those of the command, as they were understood
    servers: label, URL and model of each
    """
    return {
        "schema": SCHEMA,
        "created": created,
        "options": dict(options),
        "servers": [dict(server) for server in servers],
        "client": {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "num_cores": os.cpu_count(),
            "load_averages": list(os.getloadavg()),
        },
        "definitions": {**DEFINITIONS, "goodput": GOODPUT_SAID, "intervals": INTERVALS_SAID},
        "confidence": CONFIDENCE,
        "num_resamples": NUM_RESAMPLES,
        "runs": [_run(run) for run in runs],
        "pairs": {name: asdict(comparison) for name, comparison in comparisons.items()},
    }


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """Write the document. Raises InvalidConfig if the file cannot be written."""
    data = msgspec.json.encode(document)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise InvalidConfig("--json", [f"{path} cannot be written: {error.strerror}"]) from error


def _run(run: MeasuredRun) -> dict[str, object]:
    summary = run.summary
    start_s = min((record.arrival_s - record.request.arrival_s for record in run.result.records), default=0.0)
    records = sorted(run.result.records, key=lambda record: record.request.index)
    return {
        "label": run.label,
        "pair": run.pair,
        "seed": run.seed,
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "failures": {kind: asdict(failure) for kind, failure in summary.failures.items()},
        "total_input_tokens": summary.num_input_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "request_throughput": summary.requests_per_s,
        "output_throughput": summary.output_tokens_per_s,
        "total_token_throughput": summary.total_tokens_per_s,
        "goodput": None if summary.goodput is None else asdict(summary.goodput),
        "metrics": {name: _metric(metric) for name, metric in summary.metrics.items()},
        "tokens_per_event": summary.tokens_per_event,
        "max_concurrent_requests": summary.peak_concurrency,
        "itl_share_of_requests": summary.itl_share,
        "generator": asdict(summary.generator) | {"is_late": summary.generator.is_late},
        "requests": [_request(record, start_s) for record in records],
    }


def _metric(metric: Distribution) -> dict[str, object]:
    percentiles = {f"{percent:g}": asdict(estimate) for percent, estimate in metric.percentiles.items()}
    return {"count": metric.num_values, "mean": asdict(metric.mean), "std": metric.std, "percentiles": percentiles}


def _request(record: RequestRecord, start_s: float) -> dict[str, object]:
    """Return a request; times are seconds after the start of its run. itl: null if the run was too long to keep it"""
    return {
        "index": record.request.index,
        "arrival": record.arrival_s - start_s,
        "due": record.due_s - start_s,
        "sent": record.sent_s - start_s,
        "ttft": record.ttft_s if record.first_s is not None else None,
        "e2el": record.e2e_s if record.first_s is not None else None,
        "tpot": record.tpot_s if record.first_s is not None else None,
        "itl": None if record.gaps_s is None else [round(gap_s, 7) for gap_s in record.gaps_s],
        "asked_input_tokens": record.request.num_input_tokens,
        "asked_output_tokens": record.request.num_output_tokens,
        "input_tokens": record.num_input_tokens,
        "output_tokens": record.num_tokens,
        "events": record.num_events,
        "error": record.error,
        "detail": record.detail,
    }
