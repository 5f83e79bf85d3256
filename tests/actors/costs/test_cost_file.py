from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.costs.cost_file import (
    CostFileRefused,
    CostIdentity,
    load_cost_model,
    remove_unfinished,
    save_cost_model,
)
from actors.costs.step_cost_model import CostOrigin, Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES

IDENTITY = CostIdentity("demo", "x86_64, 2 threads", "bfloat16")
MODEL = StepCostModel(
    tuple(float(n) for n in range(NUM_FEATURES)), (Residuals("mixed", 70, -0.1, 0.0, 0.1, 0.05),) * 3, 2
)


def test_a_saved_model_is_loaded(tmp_path: Path) -> None:
    save_cost_model(tmp_path / "cost.json", IDENTITY, MODEL, 5.0, "decode-0")
    for reader, origin in (("decode-0", CostOrigin.FILE), ("prefill-0", CostOrigin.SIBLING)):
        loaded = load_cost_model(tmp_path / "cost.json", IDENTITY, reader)
        assert loaded == replace(MODEL, origin=origin)
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "raypd-step-cost/0"}, 'has the schema "raypd-step-cost/0", and this raypd reads'),
        ({"schema": None}, "has the schema null"),
        ({"features": ["token"]}, "has the features token; this raypd has others"),
        ({"identity": {"model": "demo", "device": "H100", "dtype": "bfloat16"}}, "device 'H100', and this engine has"),
        ({"saved_at_s": -1}, "no step cost model"),
        ({"further": 1}, "no step cost model"),
        ({"cost_model": {"coefficients": [1.0]}}, "no step cost model"),
        ({"cost_model": {"coefficients": [-1.0] * NUM_FEATURES}}, "no step cost model"),
    ],
)
def test_a_foreign_old_or_broken_file_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "cost.json"
    save_cost_model(path, IDENTITY, MODEL, 5.0, "decode-0")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CostFileRefused, match=r"cost\.json") as refused:
        load_cost_model(path, IDENTITY)
    assert reason in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{" * 1000, b" " * 100_000, b'{"schema": "raypd-step-cost/2"}'])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "cost.json").write_bytes(data)
    with pytest.raises(CostFileRefused, match=r"cost\.json"):
        load_cost_model(tmp_path / "cost.json", IDENTITY)


def test_a_missing_file_is_refused_with_the_systems_reason(tmp_path: Path) -> None:
    with pytest.raises(CostFileRefused, match="No such file"):
        load_cost_model(tmp_path / "cost.json", IDENTITY)


def test_only_the_user_may_read_the_file(tmp_path: Path) -> None:
    save_cost_model(tmp_path / "cost.json", IDENTITY, MODEL, 5.0, "decode-0")
    assert (tmp_path / "cost.json").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cost.json")
    with pytest.raises(CostFileRefused, match="not a regular file"):
        load_cost_model(tmp_path / "cost.json", IDENTITY)


def test_engines_with_another_identity_have_another_file() -> None:
    names = {
        identity.file_name("both")
        for identity in (
            IDENTITY,
            CostIdentity("demo", "H100", "bfloat16"),
            CostIdentity("demo", "H100", "bfloat16", 2),
        )
    }
    assert len(names) == 3


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cost.json"
    save_cost_model(path, IDENTITY, MODEL, 5.0, "decode-0")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_cost_model(path, IDENTITY, replace(MODEL, num_drifts=9), 6.0, "decode-0")
    assert load_cost_model(path, IDENTITY).num_drifts == MODEL.num_drifts
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]


_KILLED_WRITE = """
import os, signal, sys
from pathlib import Path
from actors.costs.cost_file import CostIdentity, save_cost_model
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import NUM_FEATURES
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
save_cost_model(
    Path(sys.argv[1]), CostIdentity("demo", "cpu", "float32"), StepCostModel((1.0,) * NUM_FEATURES), 6.0, "decode-0"
)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    save_cost_model(path, IDENTITY, replace(MODEL, num_drifts=9), 5.0, "decode-0")
    killed = subprocess.run([sys.executable, "-c", _KILLED_WRITE, str(path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert load_cost_model(path, IDENTITY).num_drifts == 9
    (unfinished,) = set(tmp_path.iterdir()) - {path}
    remove_unfinished(path)
    assert unfinished.exists(), "another engine may be writing it now"
    remove_unfinished(path, now_s=unfinished.stat().st_mtime + 3601)
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]
