"""The kernels compute what float64 does, in Triton's interpreter.

Tests of actors/model/attention/triton_backend.py, actors/model/attention/triton_kernels/kernels.py,
actors/model/attention/triton_kernels/launches.py, actors/model/attention/triton_kernels/operators.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("interpreted.py")


def run_in_interpreter(name: str) -> None:
    """Run the tests of a class of interpreted.py where Triton interprets kernels. All of them have to pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "580"]
    ran = subprocess.run(
        [*command, f"{INTERPRETED}::{name}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.more
@pytest.mark.parametrize("name", ["TestSample", "TestGroups"])
def test_a_sample_of_batches_is_right(name: str) -> None:
    run_in_interpreter(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["TestShapes", "TestTypes"])
def test_all_combinations_are_right(name: str) -> None:
    run_in_interpreter(name)
