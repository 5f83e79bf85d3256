"""Large blocks that were freed are the system's again."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
from pathlib import Path

from actors.process.allocator import give_back_large_blocks, give_back_what_is_free

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
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=110)


_THREADS = """
import threading
import time
from pathlib import Path

from actors.process.allocator import give_back_large_blocks, give_back_regularly

def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

give_back_large_blocks()
give_back_regularly(interval_s=0.05)
first, kept = rss_mib(), []

def receive(number, has_begun, may_end):
    parts = [b"b" * 60_000 for _ in range(500)]
    kept.extend(parts[::100])
    has_begun.wait()
    may_end.wait()

has_begun, may_end = threading.Barrier(9), threading.Event()
threads = [threading.Thread(target=receive, args=(number, has_begun, may_end)) for number in range(8)]
for thread in threads:
    thread.start()
has_begun.wait(60)
assert rss_mib() > first + 150, (first, rss_mib())
may_end.set()
for thread in threads:
    thread.join()
end_s = time.monotonic() + 60
while rss_mib() > first + 30:
    assert time.monotonic() < end_s, (first, rss_mib())
    time.sleep(0.05)
"""


def test_small_blocks_of_every_thread_are_given_back_soon() -> None:
    subprocess.run([sys.executable, "-c", _THREADS], check=True, timeout=110)
