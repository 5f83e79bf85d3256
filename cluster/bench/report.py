"""Shows the figures of runs and pairs in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.bench.estimates import CONFIDENCE, INTERVALS_SAID, Distribution, Estimate
from cluster.bench.objectives import GOODPUT_SAID
from cluster.bench.pairs import PAIRS_SAID, Comparison
from cluster.bench.summary import DEFINITIONS, LATE_S, Summary

METRIC_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "client_queue_time": "client queue time"}


def print_summary(console: Console, summary: Summary, metrics: Sequence[str], title: str) -> None:
    """Print the figures of a run, and warnings about unreliable figures. metrics: the names that are shown"""
    counts = Table(title=title, title_justify="left", show_header=False, box=None)
    for label, value in summary_lines(summary):
        counts.add_row(label, value)
    console.print(counts)
    console.print(_metrics_table(summary.metrics, metrics))
    for warning in warnings_of(summary):
        console.print(f"[yellow]warning[/] {warning}", soft_wrap=True, highlight=False)


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the names and the values of a run's figures, without those of metrics."""
    lines = [
        ("Successful requests:", str(summary.num_completed)),
        ("Failed requests:", str(summary.num_failed)),
        *((f"  {kind}:", f"{one.num_requests}  ({one.example})") for kind, one in summary.failures.items()),
        ("Benchmark duration (s):", f"{summary.duration_s:.2f}"),
        ("Total input tokens:", str(summary.num_input_tokens)),
        ("Total generated tokens:", str(summary.num_output_tokens)),
        ("Request throughput (req/s):", f"{summary.requests_per_s:.3f}"),
    ]
    if summary.goodput is not None:
        good = summary.goodput
        lines.append(("Request goodput (req/s):", f"{good.per_s:.3f}  ({good.num_good} requests, {good.share:.1%})"))
    return [
        *lines,
        ("Output token throughput (tok/s):", f"{summary.output_tokens_per_s:.2f}"),
        ("Total token throughput (tok/s):", f"{summary.total_tokens_per_s:.2f}"),
        ("Peak concurrent requests:", str(summary.peak_concurrency)),
        ("Tokens per event:", "unknown" if math.isnan(summary.tokens_per_event) else f"{summary.tokens_per_event:.3f}"),
        ("Generator, processor time:", _generator_line(summary)),
    ]


def _generator_line(summary: Summary) -> str:
    generator = summary.generator
    late = f"sends late by p99 {generator.lateness_p99_s * 1e3:.1f} ms, max {generator.lateness_max_s * 1e3:.1f} ms"
    return f"{generator.cpu_share:.1%} of a core, {generator.cpu_per_token_s * 1e6:.0f} us per token; {late}"


def _metrics_table(metrics: Mapping[str, Distribution], shown: Sequence[str]) -> Table:
    """Show a figure a line: a terminal of 80 columns has room for all of it."""
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column(f"{CONFIDENCE:.0%} interval", justify="right", no_wrap=True)
    is_any_thin = False
    for name in shown:
        if name not in metrics:
            continue
        metric, label = metrics[name], METRIC_NAMES.get(name, name)
        table.add_row(f"{label} mean", *_cells(metric.mean, is_thin=metric.num_values < 10))
        for percent, one in metric.percentiles.items():
            is_thin = metric.is_thin(percent)
            is_any_thin = is_any_thin or is_thin
            table.add_row(f"{label} P{percent:g}", *_cells(one, is_thin=is_thin))
        table.add_section()
    if is_any_thin:
        table.caption = "~ fewer than five values lie beyond this percentile: single requests decide it"
    return table


def _cells(estimate: Estimate, *, is_thin: bool) -> tuple[Text, Text]:
    """Return a figure and its interval."""
    if math.isnan(estimate.value):
        return Text("-"), Text("")
    value = Text(f"{'~' if is_thin else ''}{estimate.value * 1e3:.2f}")
    return value, Text(f"{estimate.low * 1e3:.2f} to {estimate.high * 1e3:.2f}", style="dim")


def warnings_of(summary: Summary) -> list[str]:
    """Return warnings about figures that are not reliable."""
    warnings, generator = [], summary.generator
    if generator.is_late:
        warnings.append(
            f"the generator itself was too slow (more than {LATE_S * 1e3:.0f} ms): sends were late by p99 "
            f"{generator.lateness_p99_s * 1e3:.1f} ms, its event loop by p99 {generator.lag_p99_s * 1e3:.1f} ms; times "
            "are at most as exact as that. Run it on another machine, or offer less"
        )
    if summary.num_uncounted:
        warnings.append(
            f"the server did not count the tokens of {summary.num_uncounted} answers (no usage): their events were "
            "counted instead, and TPOT and tok/s are wrong if events have several tokens"
        )
    if summary.tokens_per_event > 1.01:
        warnings.append(
            f"events had {summary.tokens_per_event:.2f} tokens on average: ITL is between events, so compare TPOT"
        )
    if summary.num_other_lengths:
        warnings.append(
            f"{summary.num_other_lengths} answers had another length than was asked for: --ignore-eos makes them exact"
        )
    if summary.itl_share < 1:
        warnings.append(f"the run was too long to keep every gap: ITL is of {summary.itl_share:.1%} of the requests")
    return warnings


def print_comparison(console: Console, comparisons: Mapping[str, Comparison], num_pairs: int) -> None:
    """Print the comparison of two servers. comparisons: by the name of the figure"""
    table = Table(title=f"{num_pairs} pairs, medians", title_justify="left")
    for column in ("", "A", "B", "B / A", f"{CONFIDENCE:.0%} interval"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, one in comparisons.items():
        if not math.isnan(one.ratio):
            interval = f"{one.low:.3f} to {one.high:.3f}"
            table.add_row(name, f"{one.median_a:.4g}", f"{one.median_b:.4g}", f"{one.ratio:.3f}", interval)
    console.print(table)


def print_definitions(console: Console, metrics: Sequence[str], *, has_goodput: bool, has_pairs: bool) -> None:
    """Print what the figures mean."""
    said = [DEFINITIONS[name] for name in metrics if name in DEFINITIONS]
    said += [GOODPUT_SAID] if has_goodput else []
    said += [INTERVALS_SAID, PAIRS_SAID] if has_pairs else [INTERVALS_SAID]
    for line in said:
        console.print(Text(line, style="dim"))
