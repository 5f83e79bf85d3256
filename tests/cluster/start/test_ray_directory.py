from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.start.ray_directory import RayDirectory

_TWO_DAYS_S = 2 * 86400


def _age(directory: Path) -> None:
    then_s = directory.stat().st_mtime - _TWO_DAYS_S
    os.utime(directory, (then_s, then_s))


def test_nobody_else_can_enter_it_whatever_mode_ray_gives_to_what_is_in_it(tmp_path: Path) -> None:
    directory = RayDirectory(tmp_path)
    directory.path.mkdir(mode=0o777)
    assert stat.S_IMODE(directory.path.parent.stat().st_mode) == 0o700
    assert directory.path.parent.parent == tmp_path
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_kept_is_removed_by_a_start_after_a_day(tmp_path: Path) -> None:
    kept = RayDirectory(tmp_path)
    kept.logs.mkdir(parents=True)
    kept.keep()
    RayDirectory(tmp_path).remove()
    assert kept.logs.is_dir(), "its logs can be read for a day"
    _age(kept.path.parent)
    RayDirectory(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_one_in_use_stays_however_old_it_is(tmp_path: Path) -> None:
    used = RayDirectory(tmp_path)
    used.path.mkdir()
    _age(used.path.parent)
    RayDirectory(tmp_path).remove()
    assert used.path.is_dir()
    used.remove()


def test_what_only_has_such_a_name_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "raypd-ray-link").symlink_to(target)
    (tmp_path / "raypd-ray-file").touch()
    for path in (target, tmp_path / "raypd-ray-file"):
        _age(path)
    RayDirectory(tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raypd-ray-file", "raypd-ray-link", "target"]


def test_a_parent_with_a_long_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    directory = RayDirectory()
    try:
        assert directory.path.parent.parent == Path("/tmp")
        socket_path = directory.path / "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
        assert len(str(socket_path)) <= 107
    finally:
        directory.remove()
