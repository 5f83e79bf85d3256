"""Measure what the live page costs an ingress: `python -m benchmarks.live_page`.

One process serves the page of a scripted cluster, with 50 engines and 200 requests per second that end. Its processor
time is taken without viewers, with one and with several; the script takes the same time in each. Viewers are processes
of their own, which read and throw away. Then, without a server: the processor time and the size of single snapshots.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time

from cluster.api.http.live_page.live_feed import INTERVAL_S
from cluster.observability.live.live_snapshot import SnapshotMaker
from cluster.observability.request_records import RequestRecords
from tests.cluster.api.http.live_page.scripted_cluster import ScriptedCluster, scripted_server

_ENDS_INTERVAL_S = 0.05
_VIEWER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"GET /ui/events HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
seen = b""
while b"data: " not in seen:
    seen += connection.recv(1 << 16)
print("it has come", flush=True)
while connection.recv(1 << 20):
    pass
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engines", type=int, default=50)
    parser.add_argument("--rate", type=float, default=200.0, help="requests that end per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 1, 8])
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}")
    shares: dict[int, list[float]] = {number: [] for number in options.viewers}
    for _ in range(options.rounds):
        for number in options.viewers:
            measured = _measure(options.engines, options.rate, options.seconds, number)
            shares[number].append(measured)
    for number, found in shares.items():
        each = ", ".join(f"{share:.2%}" for share in found)
        print(f"{number} viewers: {statistics.median(found):.2%} of a core (each round: {each})")
    _measure_snapshots(options.engines, options.rate)


def _measure(num_engines: int, rate: float, seconds: float, num_viewers: int) -> float:
    """Return the share of a core that the process takes, the script included."""
    cluster = ScriptedCluster(num_engines // 2)
    return asyncio.run(_serve(cluster, rate, seconds, num_viewers))


async def _serve(cluster: ScriptedCluster, rate: float, seconds: float, num_viewers: int) -> float:
    async with scripted_server(cluster) as port:
        viewers = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", _VIEWER, str(port), stdout=subprocess.PIPE)
            for _ in range(num_viewers)
        ]
        for viewer in viewers:
            assert viewer.stdout is not None
            assert await viewer.stdout.readline() == b"it has come\n"
        await _end_requests(cluster, rate, 3.0)
        cpu_s, began_s = time.process_time(), time.monotonic()
        await _end_requests(cluster, rate, seconds)
        share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        for viewer in viewers:
            viewer.terminate()
            await viewer.wait()
    return share


async def _end_requests(cluster: ScriptedCluster, rate: float, seconds: float) -> None:
    began_s, num_ended = time.monotonic(), 0
    while (age_s := time.monotonic() - began_s) < seconds:
        while num_ended < age_s * rate:
            cluster.end_request(f"chatcmpl-{num_ended:032d}", pair=num_ended % cluster.num_pairs)
            num_ended += 1
        await asyncio.sleep(_ENDS_INTERVAL_S)


def _measure_snapshots(num_engines: int, rate: float) -> None:
    cluster = ScriptedCluster(num_engines // 2)
    records = RequestRecords("ingress-0", cluster.store)
    maker = SnapshotMaker(records, lambda most: (), ingress="ingress-0", version="1", now_s=time.time())
    times_s, sizes = [], []
    for number in range(60):
        for index in range(int(rate * INTERVAL_S)):
            cluster.end_request(f"chatcmpl-{number:016d}-{index:015d}", pair=index % cluster.num_pairs)
        view = asyncio.run(cluster.view())
        began_s = time.process_time()
        sizes.append(len(maker.make(view)))
        times_s.append(time.process_time() - began_s)
    mean_s = statistics.mean(times_s[5:])
    share = mean_s / INTERVAL_S
    print(f"a snapshot: {mean_s * 1e3:.2f} ms, {share:.2%} of a core at {1 / INTERVAL_S:g} a second")
    print(
        f"its size: {statistics.mean(sizes[5:]) / 1024:.0f} KiB; a viewer's first one: {len(maker.first()) >> 10} KiB"
    )


if __name__ == "__main__":
    main()
