"""Tests which of Ray's processes a local cluster leaves out, and the program that stands in for one of them.

Tests of cluster/start/agent_stand_in.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import _raylet
from ray._private import node, services, utils

from cluster.config import ClusterConfig
from cluster.start import agent_stand_in, local_ray
from cluster.start.needed_processes import only_needed_processes, with_stand_in
from cluster.start.ray_directory import RayDirectory
from tests.patience import CLUSTER_S

_REPLACED = (
    (services, "start_api_server"),
    (services, "start_ray_process"),
    (utils, "get_dashboard_dependency_error"),
    (node.Node, "start_monitor"),
    (node.Node, "start_log_monitor"),
)


def _functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in _REPLACED]


def test_a_raylet_gets_the_program_that_stands_in_for_the_dashboards_agent() -> None:
    command = [
        "raylet",
        "--session_dir=/tmp/a b",
        "--node_id=6e",
        "--dashboard_agent_command=python agent.py",
        "--head",
    ]
    agent = f'{sys.executable} -I -S {agent_stand_in.__file__} "/tmp/a b" 6e'
    assert with_stand_in(command) == [*command[:3], f"--dashboard_agent_command={agent}", "--head"]


def test_other_commands_of_ray_stay_as_they_are() -> None:
    command = ["gcs_server", "--log_dir=/tmp/logs", "--config_list=eyJhIjogMX0="]
    assert with_stand_in(command) == command


def test_rays_functions_are_back_after_the_start_and_after_a_failed_one() -> None:
    before = _functions()
    with only_needed_processes():
        assert all(now is not then for now, then in zip(_functions(), before, strict=True))
    assert _functions() == before
    with pytest.raises(RuntimeError), only_needed_processes():
        raise RuntimeError
    assert _functions() == before


def test_another_version_of_ray_starts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    before = _functions()
    with only_needed_processes():
        assert _functions() == before


def test_the_stand_in_names_no_port_and_ends_when_the_raylet_does(tmp_path: Path) -> None:
    services_of_agent = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN")
    files = [tmp_path / f"{getattr(_raylet, f'{service}_PORT_NAME')}_6e" for service in services_of_agent]
    command = [sys.executable, "-I", "-S", agent_stand_in.__file__, str(tmp_path), "6e"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as stand_in:
        assert stand_in.stdin is not None
        stand_in.stdin.close()
        assert stand_in.wait(CLUSTER_S) == 0
    assert [file.read_text() for file in files] == ["-1", "-1", "-1"]
    assert sorted(tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize(("all_processes", "is_lean"), [(False, True), (True, False)])
def test_the_setting_chooses_what_ray_starts(
    all_processes: bool, is_lean: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, during = _functions(), []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "RayDirectory", lambda: RayDirectory(tmp_path))
    monkeypatch.setattr(ray, "init", lambda **_: during.extend(_functions()))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
    local_ray.connect(ClusterConfig.model_validate({"ray": {"all_processes": all_processes}}))
    local_ray.disconnect()
    assert (during != before) is is_lean
