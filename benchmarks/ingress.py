"""Measure what an ingress costs: `python -m benchmarks.ingress`.

One ingress process, with a source of tokens in place of engines, and a client process on another core. Told are: how
many streams are open, tokens per second, the ingress's CPU time per token (what a core could stream, whoever else uses
the machine), how much later than the source gave it a token arrives, and how long a prompt takes from its call to its
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import os
import pstats
import statistics
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from actors.process.garbage_collection import no_collection
from benchmarks.token_source import make_serving, prompt_of
from cluster.api.grpc.server import GrpcServerSettings, IngressServer
from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.client.channel import open_channel
from cluster.observability.status import ClusterView
from cluster.parameters.generation import GenerateChunk, GenerateRequest
from cluster.settings.ingress import IngressConfig

_NUM_CHANNELS = 8
_NUM_ADMISSIONS = 200


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that the client makes. tokens_per_s: of all streams together"""

    num_streams: int
    tokens_per_s: float
    num_tokens: int
    profile: bool = False


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--rates", type=float, nargs="+", default=[3000.0, 6000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true", help="show where the ingress's time goes")
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}")
    for rate in options.rates:
        num_tokens = max(2, round(rate * options.seconds / options.streams))
        measure_streams(Load(options.streams, rate, num_tokens, options.profile))
    for num_prompt_tokens in (4000, 1):
        measure_admission(num_prompt_tokens)


def measure_streams(load: Load) -> None:
    """Stream, and print what came of it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, load))
    process.start()
    address = ours.recv()
    with no_collection():  # The client's would count as the ingress's.
        received_s, seconds, num_messages = asyncio.run(_stream(address, load))
    ours.send("over")
    emitted_s, cpu_s = ours.recv()
    process.join()
    late_ms = sorted(
        (at_s - emitted_s[request_id][position]) * 1000
        for request_id, times_s in received_s.items()
        for position, at_s in enumerate(times_s)
    )
    num_tokens = len(late_ms)
    print(
        f"{load.num_streams} streams, {load.tokens_per_s:.0f} tokens/s offered: {num_tokens / seconds:.0f} tokens/s in "
        f"{num_messages / seconds:.0f} messages/s, {cpu_s / num_tokens * 1e6:.0f} us of CPU per token = "
        f"{num_tokens / cpu_s:.0f} tokens/s per core; late by p50 {_quantile(late_ms, 0.5):.2f} ms, "
        f"p99 {_quantile(late_ms, 0.99):.2f} ms"
    )


async def _stream(address: str, load: Load) -> tuple[dict[str, array[float]], float, int]:
    received_s: dict[str, array[float]] = {}
    num_messages = 0
    channels = [open_channel(address) for _ in range(_NUM_CHANNELS)]

    async def read(number: int) -> None:
        nonlocal num_messages
        request_id = f"r{number}"
        times_s = received_s[request_id] = array("d")
        sampling = generate_pb2.SamplingParams(max_tokens=load.num_tokens, ignore_eos=True, seed=number)
        request = generate_pb2.GenerateRequest(request_id=request_id, text=f"prompt {number}", sampling_params=sampling)
        stub = generate_pb2_grpc.GenerateServiceStub(channels[number % _NUM_CHANNELS])
        async for response in stub.Generate(request):
            now_s = time.monotonic()
            num_messages += 1
            times_s.extend([now_s] * len(response.token_ids))

    await asyncio.gather(*(read(number) for number in range(load.num_streams)))
    first_s = min(times_s[0] for times_s in received_s.values())
    last_s = max(times_s[-1] for times_s in received_s.values())
    for channel in channels:
        await channel.close()
    return received_s, last_s - first_s, num_messages


def _serve(pipe: Connection, load: Load) -> None:
    asyncio.run(_serve_on_loop(pipe, load))


async def _serve_on_loop(pipe: Connection, load: Load) -> None:
    serving, source = make_serving(load.tokens_per_s, load.num_streams)
    settings = GrpcServerSettings(IngressConfig(port=0, slow_reader_timeout_s=600.0))
    server = IngressServer(serving, _no_view, _NO_ADMIN, settings)
    pipe.send(f"127.0.0.1:{await server.start()}")
    giving = asyncio.create_task(source.run(load.num_streams))
    while source.num_unfinished_requests < load.num_streams:  # noqa: ASYNC110  # a benchmark
        await asyncio.sleep(0.01)
    # All streams are open: what their opening has cost is not counted.
    profiler = cProfile.Profile() if load.profile else None
    if profiler is not None:
        profiler.enable()
    began_s = time.process_time()
    await asyncio.to_thread(pipe.recv)
    cpu_s = time.process_time() - began_s
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    giving.cancel()
    await server.drain(0)
    pipe.send((source.emitted_s, cpu_s))


def measure_admission(num_prompt_tokens: int) -> None:
    """Wall-clock time of prompts one at a time, to an engine: from where an API hands them on, and from a call."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_admit, args=(theirs,))
    process.start()
    called_s = asyncio.run(_call(ours.recv(), prompt_of(num_prompt_tokens)))
    ours.send("over")
    handed_on_s, submitted_s = ours.recv()
    process.join()
    in_ms, all_ms = (_between_ms(began_s, submitted_s) for began_s in (handed_on_s, called_s))
    print(
        f"admission of {num_prompt_tokens} token(s) of text: median {statistics.median(in_ms):.2f} ms, best "
        f"{min(in_ms):.2f} ms; client's call included: median {statistics.median(all_ms):.2f} ms, best "
        f"{min(all_ms):.2f} ms"
    )


async def _call(address: str, text: str) -> list[float]:
    """Ask for one token each; returns when."""
    called_s = []
    async with open_channel(address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        for number in range(_NUM_ADMISSIONS):
            # Each prompt is another one: no cache of the tokenizer's has seen it.
            request = generate_pb2.GenerateRequest(text=f"{number} {text}")
            request.sampling_params.max_tokens = 1
            called_s.append(time.monotonic())
            async for _ in stub.Generate(request):
                pass
    return called_s


def _admit(pipe: Connection) -> None:
    asyncio.run(_admit_on_loop(pipe))


async def _admit_on_loop(pipe: Connection) -> None:
    serving, source = make_serving(1000.0, _NUM_ADMISSIONS)
    generate, handed_on_s = serving.generate, array("d")

    def generate_timed(request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        handed_on_s.append(time.monotonic())
        return generate(request)

    serving.generate = generate_timed  # type: ignore[method-assign]  # of this one
    server = IngressServer(serving, _no_view, _NO_ADMIN, GrpcServerSettings(IngressConfig(port=0)))
    pipe.send(f"127.0.0.1:{await server.start()}")
    giving = asyncio.create_task(source.run(0))
    await asyncio.to_thread(pipe.recv)
    giving.cancel()
    await server.drain(0)
    pipe.send((handed_on_s, source.submitted_s))


def _between_ms(first_s: Sequence[float], second_s: Sequence[float]) -> list[float]:
    return [(second - first) * 1000 for first, second in zip(first_s, second_s, strict=True)]


def _quantile(ordered: list[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


async def _no_view() -> ClusterView:
    raise AssertionError("nobody asks for it")


_NO_ADMIN: Any = None
"""Nobody asks it for anything."""


if __name__ == "__main__":
    main()
