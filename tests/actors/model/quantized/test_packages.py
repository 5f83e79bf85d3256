"""bitsandbytes and torchao read and compute their checkpoints on a CPU, in a process that finds these packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install_quantized import FOLDER

PACKAGED = Path(__file__).with_name("packaged.py")


@pytest.mark.more
@pytest.mark.skipif(not FOLDER.is_dir(), reason="bitsandbytes and torchao are not installed: make .venv/.quantized")
def test_what_bitsandbytes_and_torchao_have_written_is_served_as_by_transformers() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    ran = subprocess.run(
        [*command, str(PACKAGED)],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "5 passed" in ran.stdout
