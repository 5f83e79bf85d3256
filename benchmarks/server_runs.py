"""Runs servers and `raypd bench` for the benchmarks that compare servers by their HTTP API."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RAYPD: Final = str(Path(sys.executable).with_name("raypd"))
_START_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 120.0
_GOOD_SHARE: Final = 0.9
_LOWEST_RATE: Final = 0.125
_HIGHEST_RATE: Final = 64.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. start_s: seconds from its start to its first answer"""

    url: str
    start_s: float


@contextmanager
def serving(command_of: Callable[[int], Sequence[str]]) -> Iterator[Server]:
    """Run a server within the context. Raises RuntimeError if it does not come up.

    command_of: returns the command that serves on a port of loopback
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url, began_s = f"http://127.0.0.1:{port}", time.monotonic()
    with tempfile.TemporaryFile() as log:
        command = command_of(port)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not _answers(url):
                if server.poll() is not None or time.monotonic() > began_s + _START_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not serve: {log.read()[-4000:].decode(errors='replace')}")
                time.sleep(0.5)
            yield Server(url, time.monotonic() - began_s)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_STOP_TIMEOUT_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def bench(url: str, seed: int, num_requests: int, input_len: int, output_len: int, *options: str) -> dict[str, Any]:
    """Run `raypd bench` once; returns the run of its JSON document.

    Raises RuntimeError if a request failed, unless options name aims, which a failed request misses.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "run.json"
        lengths = ["--num-prompts", str(num_requests), "--input-len", str(input_len), "--output-len", str(output_len)]
        command = [RAYPD, "bench", "--url", url, *lengths, *options, "--seed", str(seed), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [found] = json.loads(file.read_text())["runs"]
    if found["failed"] and "--slo" not in options:
        raise RuntimeError(f"{found['failed']} requests to {url} failed: {found['failures']}")
    return dict(found)


def percentile_s(found: Mapping[str, Any], metric: str, percent: int = 50) -> float:
    """Return a percentile of a metric of a run, in seconds."""
    return float(found["metrics"][metric]["percentiles"][str(percent)]["value"])


def highest_good_rate(share_at: Callable[[float], float], *, first: float = 1.0, num_halvings: int = 3) -> float:
    """Return the highest rate, in requests per second, at which at least 90 % of the requests meet the aims; else 0.

    share_at: measures the share at a rate. From `first` on, the rate is doubled while it is good, to 64 at most, or
        halved until it is, to 1/8 at least; the interval that is left is then halved num_halvings times.
    """
    good, bad = 0.0, first
    while share_at(bad) >= _GOOD_SHARE:
        good, bad = bad, 2 * bad
        if bad > _HIGHEST_RATE:
            return good
    while not good:
        rate = bad / 2
        if rate < _LOWEST_RATE:
            return 0.0
        good, bad = (rate, bad) if share_at(rate) >= _GOOD_SHARE else (0.0, rate)
    for _ in range(num_halvings):
        middle = (good + bad) / 2
        if share_at(middle) >= _GOOD_SHARE:
            good = middle
        else:
            bad = middle
    return good


def confirmed_rate(share_at: Callable[[float], float], rate: float) -> float:
    """Return the rate, lowered by tenths of it until a further measurement finds it good; 0 if none above 1/8 is.

    The highest of several rates that were good once is one with luck.
    """
    lowest = rate
    while lowest >= _LOWEST_RATE:
        if share_at(lowest) >= _GOOD_SHARE:
            return lowest
        lowest *= 0.9
    return 0.0
