"""Runs tests in a process of their own: what they set up holds for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

TIMEOUT_S: Final = 580
"""Less than the timeout of a test that calls run_tests(), which then shows what the process has printed."""


def run_tests(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run tests, of which all have to pass. arguments: pytest's; environment: further variables"""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S)]
    ran = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
