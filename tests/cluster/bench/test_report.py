from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from cluster.bench.pairs import compare
from cluster.bench.report import print_comparison, print_definitions, print_summary, warnings_of
from cluster.bench.summary import summarise
from tests.cluster.bench.runs import load_result, record


def _console() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, width=160), written


def test_a_summary_has_vllms_names_and_the_intervals() -> None:
    console, written = _console()
    records = [record(0, 0.5, 0.75, num_tokens=2), record(1, error="HTTP 429")]
    print_summary(console, summarise(load_result(records), [50.0, 99.0], {"ttft": 0.5}), ["ttft", "itl"], "title")
    lines = [" ".join(line.replace("│", "").replace("┃", "").split()) for line in written.getvalue().splitlines()]
    assert "Successful requests: 1" in lines
    assert "HTTP 429: 1 (said of 1)" in lines
    assert "Request throughput (req/s): 0.250" in lines
    assert "Request goodput (req/s): 0.250 (1 requests, 50.0%)" in lines
    assert "value 90% interval" in lines
    for name in ("mean", "P50", "P99"):
        assert f"TTFT {name} ~500.00 500.00 to 500.00" in lines
        assert f"ITL {name} ~250.00 250.00 to 250.00" in lines
    assert not any(line.startswith("TPOT") for line in lines)


def test_a_terminal_of_80_columns_shows_every_figure() -> None:
    written = io.StringIO()
    records = [record(number, 100.0, 10_000.0 + number, num_tokens=2) for number in range(20)]
    print_summary(Console(file=written, width=80), summarise(load_result(records), [50.0, 99.0]), ["ttft", "itl"], "t")
    assert "ITL mean" in written.getvalue()
    assert "99" in written.getvalue()
    assert "…" not in written.getvalue()


def test_what_makes_figures_doubtful_is_said() -> None:
    summary = summarise(load_result([record(0, 1.0, 2.0, num_tokens=6), record(1, 1.0)], lag_s=[0.5]), [50.0])
    summary = dataclasses.replace(summary, itl_share=0.25)
    warnings = warnings_of(summary)
    for part in ("the generator itself was too slow", "no usage", "3.00 tokens on average", "another length", "25.0%"):
        assert any(part in warning for warning in warnings), part
    sound = summarise(load_result([record(0, 1.0, 1.5, 2.0, num_tokens=3)]), [50.0])
    assert warnings_of(sound) == []


def test_a_comparison_shows_medians_ratios_and_intervals() -> None:
    console, written = _console()
    figures = {
        "output tok/s": compare([10.0] * 5, [12.0, 13.0, 14.0, 15.0, 16.0]),
        "none": compare([0.0] * 5, [0.0] * 5),
    }
    print_comparison(console, figures, 5)
    assert "1.400" in written.getvalue()
    assert "1.200 to 1.600" in written.getvalue()
    assert "none" not in written.getvalue()


def test_definitions_are_of_what_is_shown() -> None:
    console, written = _console()
    print_definitions(console, ["ttft"], has_goodput=False, has_pairs=False)
    assert "Time to first token" in written.getvalue()
    assert "Goodput" not in written.getvalue()
    print_definitions(console, ["itl"], has_goodput=True, has_pairs=True)
    for part in ("Inter-token latency", "Goodput", "sign test"):
        assert part in written.getvalue()
