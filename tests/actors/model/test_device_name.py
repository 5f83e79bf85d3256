from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.model import device_name as module
from actors.model.device_name import device_name


def test_a_processor_has_its_name_and_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: another\n")
    monkeypatch.setattr(module, "_PROCESSORS", tmp_path / "cpuinfo")
    assert device_name(torch.device("cpu")) == f"Fast CPU @ 3 GHz, {torch.get_num_threads()} threads"


def test_a_processor_without_a_name_is_named_by_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROCESSORS", tmp_path / "none")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert device_name(torch.device("cpu")).startswith("riscv64, ")
