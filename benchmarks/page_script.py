"""Measure how long the live page's script takes in a frame of a browser: `python -m benchmarks.page_script`.

Chromium (`apt-get install chromium`) shows the page of a scripted cluster with 50 engines and 200 requests per second,
each of which is in flight until it ends. When the lanes have a minute of requests, the browser records when its page's
thread runs script, layout that script waits for included. A frame has what begins within 1/60 s of its first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from playwright.async_api import async_playwright

from tests.cluster.api.http.live_page.chromium_of_system import chromium_path
from tests.cluster.api.http.live_page.scripted_cluster import ScriptedCluster, scripted_server

_FRAME_US: Final = 1e6 / 60
_TICK_S: Final = 0.05
_WINDOW_S: Final = 62.0
_CATEGORIES: Final = ("devtools.timeline", "v8.execute", "v8", "disabled-by-default-devtools.timeline")
_SCRIPT: Final = frozenset(
    {"FunctionCall", "EvaluateScript", "RunMicrotasks", "TimerFire", "FireAnimationFrame", "v8.callFunction"}
)
_FLAGS: Final = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


@dataclass(frozen=True, slots=True)
class _Run:
    """A time in which the page's thread ran script, in microseconds. cpu_us: of its processor time"""

    began_us: float
    wall_us: float
    cpu_us: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engines", type=int, default=50)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--decode-seconds", type=float, nargs="+", default=[1.5, 0.1], help="of each request")
    parser.add_argument("--seconds", type=float, default=40.0, help="that are recorded, after a minute")
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}")
    for decode_s in options.decode_seconds:
        runs = asyncio.run(_recorded(options.engines, options.rate, decode_s, options.seconds))
        frames = _frames(runs)
        print(f"requests that decode for {decode_s:g} s, {len(frames)} frames with script in {options.seconds:g} s")
        _print("wall clock", [sum(run.wall_us for run in frame) for frame in frames])
        _print("processor", [sum(run.cpu_us for run in frame) for frame in frames])
        share = sum(run.cpu_us for run in runs) / options.seconds / 1e6
        print(f"  all script: {share:.2%} of a core")


def _print(name: str, times_us: Sequence[float]) -> None:
    ordered = sorted(times_us)
    p90, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.9, 0.99))
    figures = f"median {statistics.median(ordered) / 1e3:.2f}, p90 {p90 / 1e3:.2f}, p99 {p99 / 1e3:.2f}"
    print(f"  script in a frame, {name}: {figures}, most {ordered[-1] / 1e3:.2f} ms")


async def _recorded(num_engines: int, rate: float, decode_s: float, seconds: float) -> list[_Run]:
    cluster = ScriptedCluster(num_engines // 2, max_records=int(rate * 90))
    async with scripted_server(cluster) as port, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=list(_FLAGS))
        page = await browser.new_page(viewport={"width": 1200, "height": 900})
        serving = asyncio.create_task(_serve(cluster, rate, decode_s, _WINDOW_S + seconds))
        await page.goto(f"http://127.0.0.1:{port}/ui")
        await asyncio.sleep(_WINDOW_S)
        await browser.start_tracing(page=page, categories=list(_CATEGORIES))
        await asyncio.sleep(seconds)
        trace = await browser.stop_tracing()
        await serving
        await browser.close()
    return _script_of(json.loads(trace)["traceEvents"])


async def _serve(cluster: ScriptedCluster, rate: float, decode_s: float, seconds: float) -> None:
    """Let requests arrive and end. Each takes as long as ScriptedCluster.end_request has it: 0.37 s and decode_s."""
    began_s, num_ended, duration_s = time.time(), 0, 0.37 + decode_s
    while (age_s := time.time() - began_s) < seconds:
        while num_ended / rate + duration_s <= age_s:
            ended_s = began_s + num_ended / rate + duration_s
            pair = num_ended % cluster.num_pairs
            cluster.end_request(f"chatcmpl-{num_ended:032d}", ended_s=ended_s, decode_s=decode_s, pair=pair)
            num_ended += 1
        in_flight = range(num_ended, int(age_s * rate))
        cluster.show_in_flight({f"chatcmpl-{n:032d}": began_s + n / rate for n in in_flight})
        await asyncio.sleep(_TICK_S)


def _script_of(events: Sequence[dict[str, Any]]) -> list[_Run]:
    """Return when the page's main thread ran script: the outermost events of it."""
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    script = [
        one
        for one in events
        if one.get("ph") == "X"
        and one["name"] in _SCRIPT
        and names.get((one["pid"], one["tid"]), "").startswith("CrRendererMain")
    ]
    runs: list[_Run] = []
    for one in sorted(script, key=lambda event: (event["ts"], -event.get("dur", 0))):
        if runs and one["ts"] < runs[-1].began_us + runs[-1].wall_us:
            continue
        runs.append(_Run(one["ts"], one.get("dur", 0), one.get("tdur", 0)))
    return runs


def _frames(runs: Sequence[_Run]) -> list[list[_Run]]:
    frames: list[list[_Run]] = []
    for run in runs:
        if not frames or run.began_us >= frames[-1][0].began_us + _FRAME_US:
            frames.append([])
        frames[-1].append(run)
    return frames


if __name__ == "__main__":
    main()
