"""The report of tests/gpu: what its figures mean, its two forms, and that it says why nothing was run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.report_figures import DecodeFigure, ModelSize, Report, read_outcomes, write_report

FIGURES = [DecodeFigure(1, 512, 3_000_000, 0.01, 0.002), DecodeFigure(64, 1024, 8_000_000, 0.004, None)]


def test_a_step_reads_the_weights_once_and_every_requests_keys_and_values() -> None:
    assert ModelSize(weight_bytes=1000, kv_token_bytes=7).step_bytes(batch=3, context=10) == 1000 + 3 * 10 * 7


def test_rates_are_those_of_the_faster_way() -> None:
    assert [figure.bytes_per_s for figure in FIGURES] == [1.5e9, 2e9]


def test_the_report_has_a_table_and_the_same_as_json(tmp_path: Path) -> None:
    report = Report(
        machine={"GPUs": "one"},
        correctness={"a": "passed", "b": "failed", "c": "skipped"},
        copy_bytes_per_s=4e9,
        decode=FIGURES,
        links={"plain copy": 2e12},
    )
    write_report(report, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | 512 | 10.00 | 2.00 | 1.5 | 38% |" in text
    assert "| 64 | 1024 | 4.00 | - | 2.0 | 50% |" in text
    assert "1 tests passed, 1 were skipped.\n- FAILED: b" in text
    assert "| plain copy | 2000.0 |" in text
    write_report(report, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["failures"] == ["b"]
    assert [entry["share_of_copy"] for entry in content["decode"]] == [0.375, 0.5]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"written as \.json or \.md"):
        write_report(Report(), tmp_path / "report.txt")


def test_outcomes_are_read_from_pytests_file(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(
        "<testsuites><testsuite><testcase classname='t' name='good'/><testcase classname='t' name='bad'><failure/>"
        "</testcase><testcase classname='t' name='broken'><error/></testcase>"
        "<testcase classname='t' name='left'><skipped/></testcase></testsuite></testsuites>"
    )
    assert read_outcomes(file) == {"t.good": "passed", "t.bad": "failed", "t.broken": "failed", "t.left": "skipped"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the report takes minutes")
def test_without_a_gpu_the_report_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.report", "--out", str(tmp_path / "report.md")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "- not run: no CUDA device is visible" in (tmp_path / "report.md").read_text()
