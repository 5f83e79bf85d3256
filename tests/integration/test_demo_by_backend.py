"""`raypd demo` gives the same answers with each attention backend. Triton's kernels run in its interpreter.

An engine whose settings name a backend starts with no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from tests import triton_on_cpu
from tests.patience import TEST_S
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return answers_of_demo("torch", tmp_path_factory.mktemp("torch"))


def answers_of_demo(backend: str, directory: Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """Run the demo; returns the prompts and answers that it shows, line by line, without the table of times."""
    config = directory / "demo.yaml"
    # In 16 bits backends may round to other tokens.
    settings = {"model": {"model": str(DEMO_MODEL), "dtype": "float32"}, "cache": {"attention_backend": backend}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "cluster", "demo", "--config", str(config), "--num-requests", "2"]
    variables = os.environ | dict(environment or {})
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TEST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 requests completed; the cluster is stopped" in ran.stdout
    return [line for line in ran.stdout.splitlines() if line.startswith("│ ")]


def test_the_demo_completes_with_torch(expected: list[str]) -> None:
    assert "def fibonacci(n):" in expected[0]
    assert len(expected) > 4, "two prompts and their answers"


@pytest.mark.parametrize("backend", [pytest.param("vllm_cpu", marks=NEEDS_VLLM_CPU)])
def test_the_demo_gives_the_same_answers(backend: str, tmp_path: Path, expected: list[str]) -> None:
    assert answers_of_demo(backend, tmp_path) == expected


def test_the_demo_gives_the_same_answers_with_tritons_kernels(tmp_path: Path, expected: list[str]) -> None:
    pytest.importorskip("triton")
    assert answers_of_demo("triton", tmp_path, triton_on_cpu.environment(tmp_path)) == expected
