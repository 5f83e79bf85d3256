"""Tests that need a GPU: `pytest -m gpu tests/gpu`, no Ray. Without one, or without a fitting cupy, they are
skipped with the reason. With one GPU, two processes pose as two hosts; with several, two are used directly, too.

With RAYPD_GPU_TESTS_ON_CPU=1 those tests run whose processes can do without a GPU: so the tests themselves are tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from kv_transfer.transports.nccl_library import nccl_report
from tests.gpu.process import Process

_IS_ON_CPU: Final = os.environ.get("RAYPD_GPU_TESTS_ON_CPU") == "1"
_ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "4",
}


@dataclass(frozen=True, slots=True)
class Site:
    """The device and host that one process runs on."""

    device: str
    environment: dict[str, str]


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available() and not _IS_ON_CPU:
        pytest.skip("no CUDA device is visible")


@pytest.fixture
def nccl(gpu: None) -> None:
    if not _IS_ON_CPU and (problem := nccl_report().problem):
        pytest.skip(problem)


@pytest.fixture(params=["one GPU", "two GPUs"])
def sites(request: pytest.FixtureRequest, nccl: None) -> list[Site]:
    """For a producer and a consumer; any further process goes where the producer is.

    NCCL takes two ranks on one device for a mistake. It tells hosts apart by NCCL_HOSTID, and then does not look.
    """
    if _IS_ON_CPU:
        if request.param == "two GPUs":
            pytest.skip("the CPU stands for one GPU")
        return [Site("cpu", {}) for _ in range(2)]
    if request.param == "one GPU":
        return [Site("cuda:0", {**_ONE_GPU, "NCCL_HOSTID": f"host-{index}"}) for index in range(2)]
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device is visible")
    return [Site(f"cuda:{index}", {}) for index in range(2)]


Say = Callable[[str], None]


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Say:
    """Print a figure, whether the test passes or not."""
    plugins = request.config.pluginmanager
    capture, terminal = plugins.getplugin("capturemanager"), plugins.getplugin("terminalreporter")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(f"  {text}")

    return line


Spawn = Callable[..., Process]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process around an object: spawn(site, factory, *arguments). All of them end with the test."""
    processes: list[Process] = []

    def start(site: Site, factory: Callable[..., object], *arguments: Any) -> Process:  # whatever the factory takes
        processes.append(Process(site.environment | {"NCCL_DEBUG": "WARN"}, factory, site.device, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
