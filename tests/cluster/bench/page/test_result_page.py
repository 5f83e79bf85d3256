"""The page of a result: plots of one server and of two, and nothing that a browser would load or run.

Tests of cluster/bench/page/result_page.py, cluster/bench/page/page_style.py.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cluster.bench.document import MeasuredRun
from cluster.bench.page.result_page import MeasuredServer, Result, page_of, write_page
from cluster.bench.pairs import compare
from cluster.bench.summary import summarise
from cluster.errors import InvalidConfig
from tests.cluster.bench.runs import load_result, record

HOSTILE = "<script>alert(1)</script>"


def _run(label: str, pair: int | None = None) -> MeasuredRun:
    result = load_result([record(0, 0.5, 0.75, num_tokens=2), record(1, 1.0, num_tokens=1), record(2, error=HOSTILE)])
    return MeasuredRun(label, pair, 7, result, summarise(result, [99.0]))


def _result(*labels: str) -> Result:
    servers = [MeasuredServer(label, "http://x/v1", HOSTILE) for label in labels]
    runs = [_run(label, 0 if len(labels) > 1 else None) for label in labels]
    comparisons = {"req/s": compare([1.0] * 5, [2.0] * 5)} if len(labels) > 1 else {}
    return Result("2026-11-24", {"extra_body": HOSTILE}, servers, runs, comparisons, ["ttft", "tpot", "itl", "e2el"])


def test_two_servers_are_drawn_side_by_side_and_compared() -> None:
    page = page_of(_result("A", "B"))
    plots = re.findall(r"<figure>.*?</figure>", page)
    assert [re.findall(r'class="(?:dots )?s(\d)"', plot) for plot in plots] == [["0", "1"]] * 7
    assert "<td>req/s</td><td>1</td><td>2</td><td>2</td><td>2.000 to 2.000</td>" in page
    assert page.count("<details>") == 2


def test_one_server_has_no_comparison_and_its_figures_are_open() -> None:
    page = page_of(_result("A"))
    assert "compared with" not in page
    assert "<td>TTFT</td><td>750.00 (" in page, "the mean of 0.5 s and 1 s"
    assert "<details open>" in page


def test_a_distribution_ends_at_the_largest_value_with_all_of_them() -> None:
    [ttft, *_] = re.findall(r"<figure>.*?</figure>", page_of(_result("A")))
    [points] = re.findall(r'points="([^"]*)"', ttft)
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights == [pytest.approx((256 + 12) / 2), 12.0], "half of the values, and all of them"


class _Reader(HTMLParser):
    """Collects what a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if tag in {"script", "link", "img", "iframe", "object"} or names & {"src", "href", "onload", "onclick"}:
            self.found.append(tag)


def test_the_page_loads_nothing_and_escapes_what_servers_sent() -> None:
    reader = _Reader()
    reader.feed(page := page_of(_result("A", "B")))
    assert reader.found == []
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_a_run_without_a_single_answer_still_has_a_page() -> None:
    result = load_result([record(0, error="HTTP 500")])
    run = MeasuredRun("A", None, 1, result, summarise(result, [50.0]))
    page = page_of(Result("now", {}, [MeasuredServer("A", "u", "m")], [run], {}, ["ttft"]))
    assert "no values" in page


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--html: .*missing/out.html cannot be written: No such file"):
        write_page(tmp_path / "missing" / "out.html", _result("A"))
