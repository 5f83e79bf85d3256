from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench.document import SCHEMA, MeasuredRun, document_of, write_document
from cluster.bench.pairs import compare
from cluster.bench.summary import summarise
from cluster.errors import InvalidConfig
from tests.cluster.bench.runs import load_result, record


def test_the_document_has_figures_intervals_and_every_request(tmp_path: Path) -> None:
    result = load_result([record(1, error="HTTP 429"), record(0, 0.5, 0.75, num_tokens=2)])
    run = MeasuredRun("A", None, 7, result, summarise(result, [99.0], {"ttft": 0.5}))
    servers = [{"label": "A", "url": "http://x/v1", "model": "tiny"}]
    comparisons = {"req/s": compare([1.0] * 5, [2.0] * 5), "no": compare([0.0] * 5, [1.0] * 5)}
    document = document_of("2026-11-23T00:00:00+00:00", {"num_prompts": 2}, servers, [run], comparisons)
    write_document(tmp_path / "out.json", document)
    written = json.loads((tmp_path / "out.json").read_text())

    assert (written["schema"], written["options"], written["servers"]) == (SCHEMA, {"num_prompts": 2}, servers)
    assert written["pairs"]["req/s"] == {"median_a": 1.0, "median_b": 2.0, "ratio": 2.0, "low": 2.0, "high": 2.0}
    assert written["pairs"]["no"]["ratio"] is None
    [shown] = written["runs"]
    assert (shown["completed"], shown["failed"], shown["seed"], shown["pair"]) == (1, 1, 7, None)
    half = {"value": 0.5, "low": 0.5, "high": 0.5}
    assert shown["metrics"]["ttft"] == {"count": 1, "mean": half, "std": 0.0, "percentiles": {"99": half}}
    assert (shown["goodput"]["num_good"], shown["generator"]["is_late"]) == (1, False)
    whole, failed = shown["requests"]
    assert whole == {
        "index": 0,
        "arrival": 0.0,
        "due": 0.0,
        "sent": 0.0,
        "ttft": 0.5,
        "e2el": 0.75,
        "tpot": 0.25,
        "itl": [0.25],
        "asked_input_tokens": 8,
        "asked_output_tokens": 3,
        "input_tokens": None,
        "output_tokens": 2,
        "events": 2,
        "error": None,
        "detail": "",
    }
    assert (failed["index"], failed["ttft"], failed["error"], failed["detail"]) == (1, None, "HTTP 429", "said of 1")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--json: .*missing/out.json cannot be written: No such file"):
        write_document(tmp_path / "missing" / "out.json", {})
