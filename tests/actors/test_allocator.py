"""Large blocks that were freed are the system's again."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
from pathlib import Path

from actors.allocator import give_back_large_blocks, give_back_what_is_free

def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

give_back_large_blocks()
first = rss_mib()
for _ in range(3):
    large, between = [], []
    for _ in range(8):
        large.append(b"a" * (16 << 20))
        between.append([b"b" * 60_000])
    assert rss_mib() > first + 100
    del large
    assert rss_mib() < first + 20, (first, rss_mib())
give_back_what_is_free()
"""


def test_large_blocks_are_given_back_whatever_comes_between_them() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
