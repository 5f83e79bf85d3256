"""The kernels compute what float64 does, in Triton's interpreter.

Tests of actors/model/attention/triton_backend.py, actors/model/attention/triton_kernels/kernels.py,
actors/model/attention/triton_kernels/launches.py, actors/model/attention/triton_kernels/operators.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own_process import run_tests

INTERPRETED = Path(__file__).with_name("interpreted.py")


def run_in_interpreter(name: str, *arguments: str) -> None:
    """Run the tests of a class of interpreted.py where Triton interprets kernels. All of them have to pass.

    arguments: further ones of pytest's
    """
    run_tests(f"{INTERPRETED}::{name}", *arguments, environment={"TRITON_INTERPRET": "1"})


@pytest.mark.more
@pytest.mark.parametrize("name", ["TestSample", "TestGroups"])
def test_a_sample_of_batches_is_right(name: str) -> None:
    run_in_interpreter(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["TestShapes", "TestTypes"])
def test_all_combinations_are_right(name: str) -> None:
    run_in_interpreter(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
def test_all_combinations_with_the_sizes_of_models_are_right(head_dim: int) -> None:
    run_in_interpreter("TestSizes", "-k", f"head_{head_dim}")
