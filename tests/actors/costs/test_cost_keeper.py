from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from actors.costs import cost_keeper
from actors.costs.cost_file import CostIdentity, load_cost_model, save_cost_model
from actors.costs.cost_keeper import CostKeeper, default_directory
from actors.costs.step_cost_model import MIN_SURE_STEPS, CostOrigin, Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES

IDENTITY = CostIdentity("demo", "cpu", "float32")
SURE = StepCostModel((1.0,) * NUM_FEATURES, (Residuals("decode", MIN_SURE_STEPS, median_size=0.1),), updated_at_s=7.0)
_TIMEOUT_S = 60.0


def keep(directory: Path, model: StepCostModel | None, engine_id: str = "decode-0", role: str = "decode") -> None:
    keeper = CostKeeper(directory, IDENTITY, engine_id, role)
    keeper.start(lambda: model)
    keeper.stop()


def test_engines_of_each_role_have_a_file_of_their_own(tmp_path: Path) -> None:
    keep(tmp_path, SURE)
    assert CostKeeper(tmp_path, IDENTITY, "prefill-0", "prefill").load() is None, "it knows nothing of prompts"
    both = replace(SURE, residuals=(*SURE.residuals, Residuals("prefill", MIN_SURE_STEPS)))
    keep(tmp_path, both, "both-0", "both")
    assert CostKeeper(tmp_path, IDENTITY, "prefill-0", "prefill").load() == replace(both, origin=CostOrigin.SIBLING)
    assert CostKeeper(tmp_path, IDENTITY, "decode-0", "decode").load() == replace(SURE, origin=CostOrigin.FILE)


def test_a_sure_model_is_saved_at_the_end_and_found_by_others(tmp_path: Path) -> None:
    keep(tmp_path / "a" / "b", SURE)
    assert CostKeeper(tmp_path / "a" / "b", IDENTITY, "decode-1", "decode").load() == replace(
        SURE, origin=CostOrigin.SIBLING
    )
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("model", [None, replace(SURE, residuals=())])
def test_a_model_that_is_not_sure_is_not_saved(tmp_path: Path, model: StepCostModel | None) -> None:
    keep(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_a_model_that_has_learnt_nothing_does_not_replace_its_file(tmp_path: Path) -> None:
    keep(tmp_path, SURE)
    keeper = CostKeeper(tmp_path, IDENTITY, "decode-1", "decode")
    loaded = keeper.load()
    keeper.start(lambda: loaded)
    keeper.stop()
    assert load_cost_model(tmp_path / IDENTITY.file_name("decode"), IDENTITY, "decode-0").origin is CostOrigin.FILE


def test_a_model_is_saved_every_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_keeper, "_INTERVAL_S", 0.001)
    models = iter([SURE, replace(SURE, updated_at_s=8.0)])
    was_read = threading.Event()

    def read() -> StepCostModel | None:
        model = next(models, None)
        if model is None:
            was_read.set()
        return model

    keeper = CostKeeper(tmp_path, IDENTITY, "decode-0", "decode")
    keeper.start(read)
    assert was_read.wait(_TIMEOUT_S)
    assert load_cost_model(tmp_path / IDENTITY.file_name("decode"), IDENTITY).updated_at_s == 8.0
    keeper.stop()


def test_a_file_that_is_refused_is_named_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / IDENTITY.file_name("decode")
    foreign = CostIdentity("another model", "cpu", "float32")
    save_cost_model(path, foreign, SURE, 5.0, "decode-0")
    with caplog.at_level(logging.WARNING):
        assert CostKeeper(tmp_path, IDENTITY, "decode-0", "decode").load() is None
    assert f"{path} was fitted with model 'another model', and this engine has 'demo'" in caplog.text


def test_a_directory_that_cannot_be_used_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_keeper, "_INTERVAL_S", 0.001)
    (tmp_path / "file").write_text("no directory")
    keeper = CostKeeper(tmp_path / "file" / "costs", IDENTITY, "decode-0", "decode")
    num_reads = threading.Semaphore(0)

    def read() -> StepCostModel:
        num_reads.release()
        return SURE

    with caplog.at_level(logging.WARNING):
        assert keeper.load() is None
        caplog.clear()
        keeper.start(read)
        for _ in range(3):
            assert num_reads.acquire(timeout=_TIMEOUT_S)
        keeper.stop()
    assert len(caplog.records) == 1
    assert "is not saved" in caplog.text


def test_an_unreadable_file_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, SURE)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        assert CostKeeper(tmp_path, IDENTITY, "decode-0", "decode").load() is None
    assert "cannot be read: Permission denied" in caplog.text


def test_without_a_directory_nothing_is_kept() -> None:
    keeper = CostKeeper(None, IDENTITY, "decode-0", "decode")
    assert keeper.load() is None
    keeper.start(lambda: SURE)
    keeper.stop()


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"RAYPD_CACHE_ROOT": "/a", "XDG_CACHE_HOME": "/b"}, "/a/step_costs"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/raypd/step_costs"),
        ({"HOME": "/c"}, "/c/.cache/raypd/step_costs"),
    ],
)
def test_the_default_directory_is_in_the_users_cache(
    environment: dict[str, str], directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAYPD_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_directory() == Path(directory)
