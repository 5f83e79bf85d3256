"""OpenMP's threads soon sleep while they have no work, unless the environment says how they wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from actors.process.openmp import choose_waiting


@pytest.mark.parametrize("on_own_cores", [True, False])
@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_an_environment_that_says_how_to_wait_is_left_alone(
    name: str, on_own_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    choose_waiting(on_own_cores=on_own_cores)
    assert dict(os.environ) == before


@pytest.mark.more
@pytest.mark.parametrize(
    ("on_own_cores", "shown"), [(False, rb"OMP_WAIT_POLICY = 'PASSIVE'"), (True, rb"GOMP_SPINCOUNT = '10000'")]
)
def test_the_library_that_torch_loads_reads_it_when_it_is_set_before(on_own_cores: bool, shown: bytes) -> None:
    # OpenMP prints what it has read when it is loaded.
    code = f"from actors.process.openmp import choose_waiting as wait; wait(on_own_cores={on_own_cores}); import torch"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, check=True
    )
    assert re.search(shown, ended.stderr), ended.stderr


@pytest.mark.more
def test_the_modules_of_engine_and_rank_actors_do_not_load_torch_before_it_is_set() -> None:
    code = "import sys, actors.engine_actor, actors.ranks.ray_executor; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout.strip() == b"False"


def test_a_thread_that_ends_leaves_no_threads_of_openmp_behind() -> None:
    code = """
import asyncio, os, time, torch
from actors.process.openmp import call_in_ending_thread

def compute():
    torch.set_num_threads(3)
    torch.ones(4_000_000).sigmoid_()
    return len(os.listdir("/proc/self/task"))

async def main():
    during = await call_in_ending_thread(compute)
    deadline_s = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    print(during - before, len(os.listdir("/proc/self/task")) - before)

torch.set_num_threads(3)  # This starts threads of another library's, which stay.
before = len(os.listdir("/proc/self/task"))
asyncio.run(main())
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    during, after = map(int, shown.stdout.split())
    assert during >= 2, "the computation had no threads of its own, so nothing is shown"
    assert after == 0
