"""The report of tests/gpu on the simulated GPU; test_simulated_gpu.py starts it in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from tests.gpu import report
from tests.gpu.decode_speed import copy_bytes_per_s, measure_decode, write_config
from tests.gpu.report_figures import Report
from tests.simulated_gpu.device import install

DEVICE = install()
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_decode_steps_are_timed_eagerly_and_as_graphs(tmp_path: Path) -> None:
    directory = write_config(tmp_path, SMALL, 128)
    figures = measure_decode(directory, [(1, 20), (3, 40)], dtype="float32", num_steps=2)
    assert [(figure.batch, figure.context) for figure in figures] == [(1, 20), (3, 40)]
    assert all(figure.eager_s > 0 and figure.graph_s for figure in figures)
    kv_token_bytes = 2 * 2 * 2 * 8 * 4
    assert figures[1].step_bytes - figures[0].step_bytes == (3 * 40 - 20) * kv_token_bytes


def test_a_copy_is_timed() -> None:
    assert copy_bytes_per_s(DEVICE, 1 << 10, 2) > 0


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is, but for the sizes, and for what its tests of a GPU would find."""

    def pass_tests(written: Report) -> None:
        written.correctness = {"tests.gpu.test_model.test_one": "passed"}

    monkeypatch.setattr(report, "find_accelerator", lambda: DEVICE)
    monkeypatch.setattr(report, "run_tests", pass_tests)
    monkeypatch.setattr(report, "copy_bytes_per_s", lambda device: copy_bytes_per_s(device, 1 << 10, 2))
    monkeypatch.setattr(report, "LARGE", SMALL)
    monkeypatch.setattr(report, "CASES", [(1, 20), (3, 40)])


def run(out: Path) -> int:
    """Run the command; returns its exit status."""
    with pytest.raises(typer.Exit) as ended:
        report.main(out)
    return ended.value.exit_code


@pytest.mark.usefixtures("_small")
def test_the_command_writes_a_report_of_all_that_could_be_run(tmp_path: Path) -> None:
    assert run(tmp_path / "gpu.json") == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["correctness"] == {"tests.gpu.test_model.test_one": "passed"}
    assert [(entry["batch"], entry["context"]) for entry in content["decode"]] == [(1, 20), (3, 40)]
    assert all(entry["graph_s"] and entry["share_of_copy"] > 0 for entry in content["decode"])
    assert [reason.partition(":")[0] for reason in content["skipped"]] == ["NCCL"], "there is no NCCL here"
    assert content["failures"] == []


@pytest.mark.usefixtures("_small")
def test_a_part_that_breaks_is_a_failure_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(directory: Path, cases: object) -> None:
        raise RuntimeError("out of memory\nwith more to say")

    monkeypatch.setattr(report, "measure_decode", break_down)
    assert run(tmp_path / "gpu.md") == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "1 tests passed, 0 were skipped.\n- FAILED: decode steps: RuntimeError: out of memory\n" in text
    assert "A copy within the device moves" in text


def test_a_name_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"written as \.json or \.md"):
        report.main(tmp_path / "gpu.txt")
