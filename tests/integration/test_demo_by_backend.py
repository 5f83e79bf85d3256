"""`raypd demo` completes with each backend of a CPU. An engine whose settings name one starts with no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import TEST_S
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]


@pytest.mark.parametrize("backend", ["torch", pytest.param("vllm_cpu", marks=NEEDS_VLLM_CPU)])
def test_the_demo_completes(backend: str, tmp_path: Path) -> None:
    config = tmp_path / "demo.yaml"
    config.write_text(json.dumps({"cache": {"attention_backend": backend}}), encoding="utf-8")
    command = [sys.executable, "-m", "cluster", "demo", "--config", str(config), "--num-requests", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TEST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 requests completed; the cluster is stopped" in ran.stdout
