"""The lines of a start begin with the seconds since the command was given: tests of cluster/start/running.py."""

from __future__ import annotations

import re
import subprocess
import sys
import time

_CODE = "from rich.console import Console; from cluster.start.running import _say; _say(Console(), 'x')"


def test_a_line_of_the_start_has_the_seconds_since_the_process_began() -> None:
    began_s = time.monotonic()
    shown = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, check=True, text=True)
    elapsed_s = time.monotonic() - began_s
    found = re.fullmatch(r" +(\d+\.\d) s  x\n", shown.stdout)
    assert found is not None, shown.stdout
    assert 0.0 < float(found[1]) <= elapsed_s + 0.1, "its imports are included, and nothing before it began"
