"""OpenMP's threads sleep while they have no work, unless the environment says how they wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from actors.process.openmp import wait_without_spinning


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_an_environment_that_says_how_to_wait_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    wait_without_spinning()
    assert dict(os.environ) == before


def test_the_library_that_torch_loads_reads_the_policy_when_it_is_set_before() -> None:
    # OpenMP prints what it has read when it is loaded.
    code = "from actors.process.openmp import wait_without_spinning as wait; wait(); import torch"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"OMP_DISPLAY_ENV": "true"}, capture_output=True, check=True
    )
    assert re.search(rb"OMP_WAIT_POLICY = 'PASSIVE'", shown.stderr), shown.stderr


def test_the_modules_of_engine_and_rank_actors_do_not_load_torch_before_it_is_set() -> None:
    code = "import sys, actors.engine_actor, actors.ranks.ray_executor; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout.strip() == b"False"
