"""Measure what an ingress costs over SSE: `python -m benchmarks.ingress_http`.

As benchmarks/ingress.py, through the HTTP API: one ingress process, with a source of tokens in place of engines, and a
client process that reads lines. Before the streams, what a short call takes on a connection that stays open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from bisect import bisect_left
from multiprocessing.connection import Connection

from actors.process.garbage_collection import no_collection
from benchmarks.token_source import make_serving, text_lengths
from cluster.api.http.server import HttpServer
from cluster.observability.status import ClusterView
from cluster.settings.http import HttpConfig

_NUM_CALLS = 100
_HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[2000.0, 4000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}")
    for rate in options.rates:
        _measure(options.streams, rate, max(3, round(rate * options.seconds / options.streams)))


def _measure(num_streams: int, rate: float, num_tokens: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, num_streams, rate))
    process.start()
    port = ours.recv()
    asyncio.run(_call(port))
    with no_collection():  # The client's would count as the ingress's.
        events = asyncio.run(_stream(port, num_streams, num_tokens))
    ours.send("over")
    emitted_s, cpu_s = ours.recv()
    process.join()
    lengths = text_lengths(num_tokens)
    # Some tokens have no text, some events that of several: an event is as old as the token that its text ends with.
    late_ms = sorted(
        (received_s - emitted_s[request_id][bisect_left(lengths, length)]) * 1000
        for request_id, stream in events.items()
        for received_s, length in stream
    )
    total = sum(map(len, emitted_s.values()))
    seconds = max(stream[-1][0] for stream in events.values()) - min(times_s[0] for times_s in emitted_s.values())
    p50, p99 = (late_ms[int(fraction * (len(late_ms) - 1))] for fraction in (0.5, 0.99))
    print(
        f"{num_streams} streams, {rate:.0f} tokens/s offered: {total / seconds:.0f} tokens/s in "
        f"{len(late_ms) / seconds:.0f} events/s, {cpu_s / total * 1e6:.0f} us of CPU per token = {total / cpu_s:.0f} "
        f"tokens/s per core; late by p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    )


async def _call(port: int) -> None:
    """One after the other, as a client does that keeps its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "def f(n):"}).encode()
    took_ms = []
    for _ in range(_NUM_CALLS):
        began_s = time.monotonic()
        writer.write(_HEAD % (b"/tokenize", len(body)) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line.split()[1] for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        await reader.readexactly(int(length))
        took_ms.append((time.monotonic() - began_s) * 1000)
    writer.close()
    took_ms.sort()
    print(f"/tokenize, {_NUM_CALLS} calls in a row: p50 {took_ms[_NUM_CALLS // 2]:.2f} ms, max {took_ms[-1]:.2f} ms")


async def _stream(port: int, num_streams: int, num_tokens: int) -> dict[str, list[tuple[float, int]]]:
    """When each event with text came, and how many characters there were then, by stream."""
    events: dict[str, list[tuple[float, int]]] = {}

    async def read(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = {"prompt": f"prompt {number}", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked | {"request_id": str(number)}).encode()
        writer.write(_HEAD % (b"/v1/completions", len(body)) + body)
        stream = events[f"cmpl-{number}"] = []
        length = 0
        while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                received_s = time.monotonic()
                [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
                if choice["text"]:
                    length += len(choice["text"])
                    stream.append((received_s, length))
        writer.close()

    await asyncio.gather(*(read(number) for number in range(num_streams)))
    return events


def _serve(pipe: Connection, num_streams: int, rate: float) -> None:
    asyncio.run(_serve_on_loop(pipe, num_streams, rate))


async def _serve_on_loop(pipe: Connection, num_streams: int, rate: float) -> None:
    serving, source = make_serving(rate, num_streams)
    server = HttpServer(serving, _no_view, HttpConfig(port=0), slow_reader_timeout_s=600.0, host="127.0.0.1")
    pipe.send(await server.start())
    giving = asyncio.create_task(source.run(num_streams))
    while source.num_unfinished_requests < num_streams:  # noqa: ASYNC110  # a benchmark
        await asyncio.sleep(0.01)
    began_s = time.process_time()
    await asyncio.to_thread(pipe.recv)
    cpu_s = time.process_time() - began_s
    giving.cancel()
    await server.drain(0)
    pipe.send((source.emitted_s, cpu_s))


async def _no_view() -> ClusterView:
    raise AssertionError("nobody asks for it")


if __name__ == "__main__":
    main()
