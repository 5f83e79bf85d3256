"""bitsandbytes, torchao and gptqmodel read and compute their checkpoints on a CPU, in a process that finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install_quantized import FOLDER, GPTQ_FOLDER


@pytest.mark.more
@pytest.mark.skipif(not FOLDER.is_dir(), reason="bitsandbytes and torchao are not installed: make .venv/.quantized")
def test_what_bitsandbytes_and_torchao_have_written_is_served_as_by_transformers() -> None:
    assert "5 passed" in run("packaged.py", FOLDER)


@pytest.mark.slow
@pytest.mark.skipif(not GPTQ_FOLDER.is_dir(), reason="gptqmodel is not installed: make .venv/.quantized_gptq")
def test_gptq_and_awq_checkpoints_are_served_as_by_transformers() -> None:
    assert "4 passed" in run("packaged_gptq.py", GPTQ_FOLDER)


def run(file: str, folder: Path) -> str:
    """Run the tests of a file where these packages are, and return what pytest has printed; all have to pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    ran = subprocess.run(
        [*command, str(Path(__file__).with_name(file))],
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout
