"""A step of the kernels mixes no devices and does not wait for the device.

Tests of actors/model/attention/triton_kernels/operators.py, actors/model/attention/triton_backend.py.
"""

from __future__ import annotations

import subprocess
import sys


def test_a_step_mixes_no_devices_and_never_waits() -> None:
    command = [sys.executable, "-m", "tests.actors.model.attention.triton_kernels.fake_device"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
