"""Measure what it costs an ingress that everything can be seen: `python -m benchmarks.seeing`.

Two ingress processes stream tokens of a source in place of engines to clients over HTTP, one with everything off and
one with everything on, side by side: so that both meet each change of the machine's speed. Told is each process's CPU
time per token, and the median ratio within pairs, which begin with either in turns, with its interval. The client costs
little, so that it never falls behind: an ingress would send several tokens at a time then, at less cost. Everything is:
records of requests, the request trace, traces for OpenTelemetry, a viewer of the live page, a reader of /metrics every
15 s, and an endpoint picker that reads /metrics/vllm 20 times a second. A part alone is measured by --parts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from actors.core.requests.block_hash import BlockHashKey
from actors.process.garbage_collection import no_collection
from benchmarks.token_source import TokenSource, make_serving
from cluster.api.http.server import HttpServer
from cluster.bench.pairs import MIN_PAIRS, a_is_first, compare
from cluster.observability.live.live_snapshot import MAX_IN_FLIGHT
from cluster.observability.status import ClusterView
from cluster.observability.trace_writing.request_tracer import RequestTracer, start_tracer
from cluster.observability.tracing.request_tracing import RequestTracing
from cluster.observability.tracing.span_export import SpanExport
from cluster.observability.vllm_dialect import IngressLoad, VllmDialect
from cluster.requests.serving import Serving
from cluster.settings.http import HttpConfig
from cluster.settings.request_recording import RequestTraceConfig
from cluster.settings.tracing import TracingConfig
from tests.cluster.api.http.live_page.scripted_cluster import ScriptedCluster

PARTS = ("records", "request_trace", "tracing", "page", "metrics", "picker")
_HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
_STREAM_END: Final = b"data: [DONE]"
_END_SIZE: Final = len(_STREAM_END) + 64
_METRICS_INTERVAL_S = 15.0
_PICKER_INTERVAL_S = 0.05
_READER = """
import socket, sys, time
port, path, interval_s, is_stream = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4] == "True"
def connect():
    return socket.create_connection(("127.0.0.1", port))
connection = connect()
def receive():
    return connection.recv(1 << 20) or sys.exit()
asked = f"GET {path} HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n".encode()
next_s = time.monotonic()
while True:
    connection.sendall(asked)
    head = b""
    while is_stream or b"\\r\\n\\r\\n" not in head:
        head += receive()[:0 if is_stream else None]
    head, body = head.split(b"\\r\\n\\r\\n", 1)
    lines = head.lower().split(b"\\r\\n")
    length = int(next(line.split(b":")[1] for line in lines if line.startswith(b"content-length")))
    while len(body) < length:
        body += receive()
    next_s += interval_s
    time.sleep(max(0.0, next_s - time.monotonic()))
    if interval_s >= 5:
        connection = connect()  # The server has closed the connection by now.
"""
_SINK = """
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an ingress. parts: what is on; tokens_per_s: of all streams together"""

    parts: tuple[str, ...]
    num_streams: int
    tokens_per_s: float
    num_tokens: int
    seconds: float
    num_engines: int
    sample_ratio: float
    profile: bool


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=9, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens per second")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--sample-ratio", type=float, default=TracingConfig().sample_ratio)
    parser.add_argument("--profile", action="store_true", help="show where the time with everything on goes")
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}")
    shape = (options.streams, options.rate, options.tokens, options.seconds, options.engines, options.sample_ratio)
    off, on = Run((), *shape, profile=False), Run(tuple(options.parts), *shape, profile=options.profile)
    found: dict[Run, list[float]] = {off: [], on: []}
    for pair in range(options.pairs):
        runs = (off, on) if a_is_first(pair) else (on, off)
        for run, microseconds in zip(runs, _measure(runs), strict=True):
            found[run].append(microseconds)
        print(f"pair {pair + 1}: off {found[off][-1]:.1f} us per token, on {found[on][-1]:.1f} us", flush=True)
    result = compare(found[off], found[on])
    print(
        f"{' '.join(on.parts)}: {result.median_a:.1f} us of CPU per token off, {result.median_b:.1f} us on; "
        f"median ratio {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f})"
    )


def _measure(runs: Sequence[Run]) -> list[float]:
    """Return the CPU time per token of each run, in microseconds. They go on side by side."""
    with ExitStack() as stack:
        ingresses = [stack.enter_context(_ingress(run)) for run in runs]
        with no_collection(), ExitStack() as readers:
            for run, ingress in zip(runs, ingresses, strict=True):
                readers.enter_context(_readers(ingress.port, run.parts))
            asyncio.run(_load_all([ingress.port for ingress in ingresses], runs))
        return [ingress.microseconds_per_token() for ingress in ingresses]


class _Ingress:
    """An ingress in a process of its own. port: of its HTTP server"""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.port: int = pipe.recv()

    def microseconds_per_token(self) -> float:
        """End the ingress."""
        self._pipe.send("over")
        assert self._pipe.poll(30.0), "an ingress does not end"
        microseconds: float = self._pipe.recv()
        return microseconds


@contextmanager
def _ingress(run: Run) -> Iterator[_Ingress]:
    ours, theirs = multiprocessing.Pipe()
    with _sink() as endpoint:
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, run, endpoint), daemon=True)
        process.start()
        try:
            yield _Ingress(ours)
            process.join(30)
        finally:
            process.kill()


@contextmanager
def _readers(port: int, parts: Sequence[str]) -> Iterator[None]:
    reads = {
        "page": ("/ui/events", 0.0, True),
        "metrics": ("/metrics", _METRICS_INTERVAL_S, False),
        "picker": ("/metrics/vllm", _PICKER_INTERVAL_S, False),
    }
    readers = [
        subprocess.Popen([sys.executable, "-c", _READER, str(port), *map(str, reads[part])])
        for part in parts
        if part in reads
    ]
    try:
        yield
        assert all(reader.poll() is None for reader in readers), "a reader has ended"
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


class _Client(asyncio.Protocol):
    """A connection that asks for one stream after the other, and throws all of it away."""

    def __init__(self, number: int, run: Run, failed: asyncio.Event) -> None:
        self._number = number
        self._run = run
        self._failed = failed
        self._num_asked = 0
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first stream; the first ones end at different times, so that the later ones do."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask(max(1, self._run.num_tokens * (self._number + 1) // self._run.num_streams))

    def data_received(self, data: bytes) -> None:
        """Ask for the next stream if this one has ended."""
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            print(data)
            self._failed.set()
        self._end = (self._end + data)[-_END_SIZE:]
        if _STREAM_END in self._end:
            self._end = b""
            self._ask(self._run.num_tokens)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that something is wrong: only the client closes."""
        self._failed.set()

    def _ask(self, num_tokens: int) -> None:
        text = f"prompt {self._number} of {self._num_asked}, which has some words in it, as most prompts have"
        asked = {"prompt": text, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked | {"request_id": f"r{self._number}-{self._num_asked}"}).encode()
        self._num_asked += 1
        self._transport.write(_HEAD % len(body) + body)


async def _load_all(ports: Sequence[int], runs: Sequence[Run]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for port, run in zip(ports, runs, strict=True):
            tasks.create_task(_load(port, run))


async def _load(port: int, run: Run) -> None:
    """Have so many streams at a time; each one that ends is followed by another."""
    loop, failed = asyncio.get_running_loop(), asyncio.Event()
    made = [
        await loop.create_connection(lambda number=number: _Client(number, run, failed), "127.0.0.1", port)  # type: ignore[misc]  # the default binds the number
        for number in range(run.num_streams)
    ]
    waiting = asyncio.create_task(failed.wait())
    # Two seconds before the ingress measures, and one after it.
    await asyncio.wait([waiting], timeout=run.seconds + 3.0)
    assert not failed.is_set(), "a stream has failed"
    for transport, _ in made:
        transport.abort()


def _serve(pipe: Connection, run: Run, endpoint: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_serve_on_loop(pipe, run, Path(directory), endpoint))


@contextmanager
def _sink() -> Iterator[str]:
    """A collector in a process of its own; gives its URL."""
    process = subprocess.Popen([sys.executable, "-c", _SINK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
    finally:
        process.kill()
        process.wait()


async def _serve_on_loop(pipe: Connection, run: Run, directory: Path, endpoint: str) -> None:
    tracer = _tracer(directory) if "request_trace" in run.parts else None
    tracing = _tracing(endpoint, run.sample_ratio) if "tracing" in run.parts else None
    serving, source = make_serving(
        run.tokens_per_s,
        run.num_streams + 1,
        max_request_records=1000 if "records" in run.parts else 0,
        request_tracer=tracer,
        tracing=tracing,
    )
    server = _http_server(serving, run.num_engines)
    pipe.send(await server.start())
    giving = asyncio.create_task(source.run(run.num_streams))
    pipe_ends = asyncio.create_task(asyncio.to_thread(pipe.recv))
    microseconds = await _measured(source, run)
    await pipe_ends
    giving.cancel()
    await server.drain(0)
    if tracer is not None:
        tracer.close(5.0)
        assert tracer.view().num_lines > 0, "nothing was traced"
    if tracing is not None:
        tracing.close()
    pipe.send(microseconds)


async def _measured(source: TokenSource, run: Run) -> float:
    """Return the CPU time per token, once all streams are open and have had two seconds."""
    while source.num_unfinished_requests < run.num_streams:  # noqa: ASYNC110  # a benchmark
        await asyncio.sleep(0.01)
    await asyncio.sleep(2.0)
    profiler = _profiler() if run.profile else None
    began_s, num_before = time.process_time(), source.num_given
    await asyncio.sleep(run.seconds - 2.0)
    cpu_s, num_tokens = time.process_time() - began_s, source.num_given - num_before
    if profiler is not None:
        profiler.disable()
        _print_profile(profiler)
    return cpu_s / num_tokens * 1e6


def _tracer(directory: Path) -> RequestTracer:
    settings = RequestTraceConfig(directory=directory / "trace")
    return start_tracer(settings, "ingress-0", BlockHashKey.draw(), now_s=time.time(), monotonic_s=time.monotonic())


def _tracing(endpoint: str, sample_ratio: float) -> RequestTracing:
    settings = TracingConfig(endpoint=endpoint, sample_ratio=sample_ratio)
    return RequestTracing(settings, SpanExport(settings, "ingress-0"), "ingress-0", time.monotonic)


def _http_server(serving: Serving, num_engines: int) -> HttpServer:
    cluster = ScriptedCluster(num_engines // 2)

    async def view(max_requests: int | None = None) -> ClusterView:
        requests = serving.requests_in_flight(max_requests)
        num_left_out = serving.num_requests_in_flight - len(requests)
        return dataclasses.replace(await cluster.view(), requests=requests, num_requests_left_out=num_left_out)

    def load() -> IngressLoad:
        return IngressLoad(serving.request_load(), 0.5, 16, 1000 * num_engines)

    dialect = VllmDialect(serving.metrics, load)
    return HttpServer(
        serving,
        view,
        HttpConfig(port=0),
        60.0,
        host="127.0.0.1",
        name="ingress-0",
        live_view=lambda: view(MAX_IN_FLIGHT),
        dialect=dialect,
    )


def _profiler() -> Any:
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    return profiler


def _print_profile(profiler: Any) -> None:
    import pstats

    pstats.Stats(profiler).sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
