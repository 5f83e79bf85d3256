"""Ray's processes look for packages in the driver's working directory first."""

from __future__ import annotations

from pathlib import Path

import pytest

import cluster
from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.start import local_ray
from cluster.start.working_directory import look_for_hiding_packages


@pytest.mark.parametrize("name", ["cluster/__init__.py", "actors/__init__.py", "kv_transfer.py"])
def test_a_directory_whose_packages_would_hide_ours_is_refused(tmp_path: Path, name: str) -> None:
    found = tmp_path / name
    found.parent.mkdir(exist_ok=True)
    found.touch()

    with pytest.raises(CannotStart, match=f"has the file {name}, .*start raypd in another directory"):
        look_for_hiding_packages(tmp_path)


def test_another_checkout_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cluster" / "start").mkdir(parents=True)
    for name in ("__init__.py", "start/working_directory.py"):
        (tmp_path / "cluster" / name).touch()

    look_for_hiding_packages(tmp_path)

    [record] = caplog.records
    assert "run the raypd of the working directory" in record.message
    assert record.__dict__["directory"] == str(tmp_path)
    assert record.__dict__["installed"] == str(Path(cluster.__path__[0]).parent)


def test_folders_that_hide_nothing_are_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "values.yaml").touch()
    (tmp_path / "actors").touch()
    look_for_hiding_packages(tmp_path)

    assert not caplog.records


def test_the_checkout_itself_and_a_link_to_it_are_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkout = Path(cluster.__path__[0]).parent
    (tmp_path / "cluster").symlink_to(checkout / "cluster")
    look_for_hiding_packages(checkout)
    look_for_hiding_packages(tmp_path)

    assert not caplog.records


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_no_ray_cluster_is_started_or_joined_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    (tmp_path / "actors.py").touch()
    monkeypatch.chdir(tmp_path)
    config = ClusterConfig.model_validate({"ray": {"address": address}})

    with pytest.raises(CannotStart, match=r"has the file actors\.py"):
        local_ray.connect(config)
