"""The report of tests/gpu: what its figures mean, its two forms, and that it says why nothing was run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import typer

from tests.gpu.report import main, run_tests
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
        broken=["decode steps: RuntimeError: out of memory"],
    )
    write_report(report, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | 512 | 10.00 | 2.00 | 1.5 | 38% |" in text
    assert "| 64 | 1024 | 4.00 | - | 2.0 | 50% |" in text
    assert "1 tests passed, 1 were skipped.\n- FAILED: b\n- FAILED: decode steps: RuntimeError: out of memory" in text
    assert "| plain copy | 2000.0 |" in text
    write_report(report, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["failures"] == ["b", "decode steps: RuntimeError: out of memory"]
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


def run_on_cpu(*arguments: str) -> str:
    """Run tests of tests/gpu, none of which may fail; returns what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYPD_GPU_TESTS_ON_CPU": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which these tests themselves are run")
def test_the_tests_whose_processes_can_do_without_a_gpu_pass() -> None:
    """Handing over, and ranks: on a GPU nothing is new but the device and NCCL."""
    # One of each: every process takes seconds to import torch.
    printed = run_on_cpu("tests/gpu/test_transfer.py", "tests/gpu/test_ranks.py", "-k", "(transfer and 32) or llama")
    assert re.search(r"\n2 passed, 2 skipped", printed), printed


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which these tests themselves are run")
def test_models_pass_their_tests_on_the_simulated_gpu() -> None:
    chosen = ("-k", "llama or gemma3 or minicpm3")
    run_on_cpu("-p", "tests.simulated_gpu.plugin", "tests/gpu/test_model.py", *chosen)


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which these tests themselves are run")
def test_every_test_is_found_and_skipped_with_its_reason() -> None:
    report = Report()
    run_tests(report)
    assert len(report.correctness) > 70
    assert set(report.correctness.values()) == {"skipped"}


def test_tests_that_cannot_be_run_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 4)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="pytest ended with status 4"):
        run_tests(Report())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the report takes minutes")
def test_without_a_gpu_the_report_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.report", "--out", str(tmp_path / "report.md")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "- not run: no CUDA device is visible" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("name", "reason"), [("report", "written as .json or .md"), ("no/report.md", "No such file")])
def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(typer.BadParameter, match=reason):
        main(tmp_path / name)
