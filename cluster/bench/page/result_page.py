"""Writes the result of a benchmark as one page of HTML, with the plots of one server, or of two side by side.

The page loads nothing and runs no script; its Content-Security-Policy says so. Whatever servers have sent is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from cluster.bench.document import MeasuredRun
from cluster.bench.estimates import INTERVALS_SAID, Estimate
from cluster.bench.objectives import GOODPUT_SAID
from cluster.bench.page.page_style import STYLE
from cluster.bench.page.svg_plots import MAX_POINTS, Plot, Series, svg_of
from cluster.bench.pairs import PAIRS_SAID, Comparison
from cluster.bench.record import RequestRecord
from cluster.bench.report import METRIC_NAMES, summary_lines, warnings_of
from cluster.bench.summary import DEFINITIONS
from cluster.errors import InvalidConfig

_NUM_STEPS: Final = 200
"""The number of equal times into which a run is divided for the plots over time."""
_CSP: Final = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server of the result, which the runs name by its label."""

    label: str
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark.

    created: the date and the time
    options: those of the command, as they were understood
    metrics: the names that are shown, as in DEFINITIONS
    """

    created: str
    options: Mapping[str, object]
    servers: Sequence[MeasuredServer]
    runs: Sequence[MeasuredRun]
    comparisons: Mapping[str, Comparison]
    metrics: Sequence[str]


def write_page(path: Path, result: Result) -> None:
    """Write the page of a result. Raises InvalidConfig if the file cannot be written."""
    try:
        path.write_text(page_of(result), "utf-8")
    except OSError as error:
        raise InvalidConfig("--html", [f"{path} cannot be written: {error.strerror}"]) from error


def page_of(result: Result) -> str:
    """Return the page of a result."""
    title = escape("raypd bench: " + " and ".join(server.model for server in result.servers))
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f'<h1>{title}</h1><p class="dim">{escape(result.created)}</p>',
            *_servers(result),
            *_comparisons(result.comparisons),
            *_plots(result),
            *_runs(result),
            *_explanations(result),
            "</body></html>\n",
        ]
    )


def _servers(result: Result) -> Iterator[str]:
    for number, server in enumerate(result.servers):
        text = escape(f"{server.label}: {server.url}, model {server.model}")
        yield f'<p><span class="key k{number}"></span>{text}</p>'


def _comparisons(comparisons: Mapping[str, Comparison]) -> Iterator[str]:
    if not comparisons:
        return
    rows = [
        [name, _number(one.median_a), _number(one.median_b), _number(one.ratio), f"{one.low:.3f} to {one.high:.3f}"]
        for name, one in comparisons.items()
    ]
    yield "<h2>B compared with A</h2>"
    yield _table(["figure", "A, median", "B, median", "B / A", "interval of B / A"], rows)
    yield f'<p class="dim">{escape(PAIRS_SAID)}</p>'


def _plots(result: Result) -> Iterator[str]:
    yield '<h2>Plots</h2><div class="plots">'
    for name in result.metrics:
        of = _VALUES.get(name)
        if of is not None:
            series = [Series(label, at, _shares(records, of)) for at, label, records in _by_server(result)]
            title = f"{METRIC_NAMES[name]}: share of values at or below a time"
            yield svg_of(Plot(title, "seconds", "share", series, has_log_x=True, y_max=1.0))
    ttfts = [
        Series(run.label, _number_of(result, run), [(at_s, ttft_s) for at_s, ttft_s in _ttfts(run)])
        for run in result.runs
    ]
    yield svg_of(Plot("TTFT of each request, by its time of sending", "seconds", "TTFT, seconds", ttfts, is_dots=True))
    under_way = [Series(run.label, _number_of(result, run), list(_under_way(run))) for run in result.runs]
    yield svg_of(Plot("Requests under way", "seconds", "requests", under_way))
    rates = [Series(run.label, _number_of(result, run), list(_token_rates(run))) for run in result.runs]
    yield svg_of(Plot("Output tokens per second", "seconds", "tokens/s", rates))
    yield "</div>"


def _runs(result: Result) -> Iterator[str]:
    yield "<h2>Figures of each run</h2>"
    for run in result.runs:
        title = run.label if run.pair is None else f"{run.label}, pair {run.pair + 1}"
        opened = " open" if len(result.runs) == 1 else ""
        yield f"<details{opened}><summary>{escape(title)}, seed {run.seed}</summary>"
        yield _table(["", ""], [[name.strip().removesuffix(":"), value] for name, value in summary_lines(run.summary)])
        yield _metrics(run, result.metrics)
        for warning in warnings_of(run.summary):
            yield f'<p class="warn">{escape(warning)}</p>'
        yield "</details>"


def _metrics(run: MeasuredRun, names: Sequence[str]) -> str:
    shown = {name: run.summary.metrics[name] for name in names if name in run.summary.metrics}
    percents = list(next(iter(shown.values())).percentiles) if shown else []
    rows = [
        [METRIC_NAMES[name], _estimate(one.mean), *(_estimate(one.percentiles[percent]) for percent in percents)]
        for name, one in shown.items()
    ]
    return _table(["ms, with intervals", "mean", *(f"P{percent:g}" for percent in percents)], rows)


def _explanations(result: Result) -> Iterator[str]:
    yield "<h2>Definitions</h2><dl>"
    for name in result.metrics:
        yield f"<dt>{escape(METRIC_NAMES[name])}</dt><dd>{escape(DEFINITIONS[name])}</dd>"
    yield f"<dt>Goodput</dt><dd>{escape(GOODPUT_SAID)}</dd><dt>Intervals</dt><dd>{escape(INTERVALS_SAID)}</dd></dl>"
    yield "<h2>Options</h2>"
    yield _table(["option", "value"], [[name, str(value)] for name, value in result.options.items()])


def _by_server(result: Result) -> Iterator[tuple[int, str, list[RequestRecord]]]:
    """Yield each server's number, its label and the complete requests of all of its runs."""
    for number, server in enumerate(result.servers):
        runs = [run for run in result.runs if run.label == server.label]
        yield number, server.label, [one for run in runs for one in run.result.records if one.is_complete]


def _number_of(result: Result, run: MeasuredRun) -> int:
    return [server.label for server in result.servers].index(run.label)


_VALUES: Final[Mapping[str, Callable[[RequestRecord], Iterable[float]]]] = {
    "ttft": lambda record: [record.ttft_s],
    "tpot": lambda record: [] if record.tpot_s is None else [record.tpot_s],
    "itl": lambda record: record.gaps_s or [],
    "e2el": lambda record: [record.e2e_s],
    "client_queue_time": lambda record: [record.queue_s],
}


def _shares(
    records: Iterable[RequestRecord], of: Callable[[RequestRecord], Iterable[float]]
) -> list[tuple[float, float]]:
    """Return the points of a distribution: values, and the share of all values up to each; at most MAX_POINTS."""
    # There may be millions of gaps between tokens.
    values = np.sort(np.fromiter((value for record in records for value in of(record)), dtype=np.float64))
    if not len(values):
        return []
    chosen = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(np.int64))
    return [(float(values[at]), (int(at) + 1) / len(values)) for at in chosen]


def _ttfts(run: MeasuredRun) -> Iterator[tuple[float, float]]:
    start_s = _start_s(run)
    complete = sorted((one for one in run.result.records if one.is_complete), key=lambda one: one.sent_s)
    return ((one.sent_s - start_s, one.ttft_s) for one in complete)


def _under_way(run: MeasuredRun) -> Iterator[tuple[float, float]]:
    """Yield the number of requests under way at equal times of the run."""
    start_s, num = _start_s(run), 0
    ends = [one.last_s if one.is_complete else one.sent_s for one in run.result.records]
    changes = sorted([*((one.sent_s, 1) for one in run.result.records), *((end_s, -1) for end_s in ends)])
    at, step_s = 0, max(run.result.duration_s, 1e-9) / _NUM_STEPS
    for step in range(_NUM_STEPS + 1):
        now_s = start_s + step * step_s
        while at < len(changes) and changes[at][0] <= now_s:
            num += changes[at][1]
            at += 1
        yield step * step_s, float(num)


def _token_rates(run: MeasuredRun) -> Iterator[tuple[float, float]]:
    """Yield the output tokens per second within equal times of the run; a request's tokens are spread evenly."""
    start_s, step_s = _start_s(run), max(run.result.duration_s, 1e-9) / _NUM_STEPS
    tokens = [0.0] * (_NUM_STEPS + 1)
    for one in run.result.records:
        if not one.is_complete or one.first_s is None:
            continue
        first, last = (int((at_s - start_s) / step_s) for at_s in (one.first_s, one.last_s))
        first, last = min(max(first, 0), _NUM_STEPS), min(max(last, 0), _NUM_STEPS)
        for step in range(first, last + 1):
            tokens[step] += one.num_tokens / (last - first + 1)
    return ((step * step_s, num / step_s) for step, num in enumerate(tokens))


def _start_s(run: MeasuredRun) -> float:
    return min((one.arrival_s - one.request.arrival_s for one in run.result.records), default=0.0)


def _estimate(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    return f"{estimate.value * 1e3:.2f} ({estimate.low * 1e3:.2f} to {estimate.high * 1e3:.2f})"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns) if any(columns) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
