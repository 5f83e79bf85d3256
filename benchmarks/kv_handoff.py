"""Measure what a handoff costs its request and everybody else: two engines in processes of their own.

python -m benchmarks.kv_handoff [--model DIR] [--repeats 30]

exposed:  how much of a handoff's transfer its prefill does not hide, by the number of the prompt's chunks
handover: from the end of prefill on P to RUNNING on D, beside a decode step of D
steps:    how long D's decode steps take while P prefills, with and without transfers arriving; the two in turns
prefixes: time to the first token with a prefix that is computed, fetched from another engine, or brought back from host
          memory
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.engine_core_outputs import RequestTimings
from actors.core.requests.request import EngineCoreRequest, RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from cluster.config import DEMO_MODEL
from cluster.requests.attempt import Attempt
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import PrefixSource
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_HOST: Final = "127.0.0.1"
_TRUST: Final = TrustMaterial.draw()
"""The secrets of this process, which gives them to the engines."""
_CHUNK_TOKENS: Final = 256
_NUM_BLOCKS: Final = 2048
_BLOCK_SIZE: Final = 16


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.model, arguments.repeats))


async def measure(model: Path, repeats: int) -> None:
    """Start both engines and run each measurement."""
    async with engine(model, "prefill-0") as prefill, engine(model, "decode-0") as decode:
        pair = Pair(prefill, decode, seed=1)
        await pair.hand_over(64, 2)  # The link comes up.
        await measure_exposed(pair, repeats)
        await measure_handover(pair, repeats)
        await measure_steps(pair, repeats)
        await measure_fetch(pair, repeats)
    async with engine(model, "prefill-0", num_blocks=160, cpu_cache_gib=1.0) as small:
        await measure_host_tier(small, repeats)


class Engine:
    """One engine process: its session, and the times of its steps."""

    def __init__(self, session: EngineSession, pipe: Connection) -> None:
        self.session = session
        self._pipe = pipe

    async def take_step_times(self) -> list[float]:
        """Seconds of the steps that computed something since the last call."""
        self._pipe.send("steps")
        times: list[float] = await asyncio.to_thread(self._pipe.recv)
        return times


@asynccontextmanager
async def engine(
    model: Path, engine_id: str, *, num_blocks: int = _NUM_BLOCKS, cpu_cache_gib: float = 0.0
) -> AsyncIterator[Engine]:
    """A started engine."""
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", device="cpu"),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=_CHUNK_TOKENS),
        parallel=ParallelConfig(num_threads=1),
        kv_transfer=KVTransferConfig(cpu_cache_gib=cpu_cache_gib),
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_engine, args=(theirs, config, engine_id, _TRUST), daemon=True)
    process.start()
    theirs.close()
    address: str = await asyncio.to_thread(ours.recv)
    session = EngineSession(
        EngineDescriptor(engine_id, 1, EngineRole.BOTH, address),
        Member(Party("ingress-0", 1), Trust(_TRUST)),
        timeout_s=10.0,
    )
    await session.open()
    try:
        yield Engine(session, ours)
    finally:
        await session.close()
        ours.send("stop")
        await asyncio.to_thread(process.join)


def _run_engine(pipe: Connection, config: EngineConfig, engine_id: str, trust: TrustMaterial) -> None:
    asyncio.run(_serve(pipe, config, engine_id, trust))


async def _serve(pipe: Connection, config: EngineConfig, engine_id: str, trust: TrustMaterial) -> None:
    from actors.engine_server import EngineServer

    server = EngineServer(config, engine_id, 1, Trust(trust))
    address = await server.start(_HOST)
    times: list[float] = []
    core: Any = server._core  # the benchmark looks inside
    core.step = _timed(core.step, core, times)
    pipe.send(address)
    while await asyncio.to_thread(pipe.recv) == "steps":
        taken, times[:] = list(times), []
        pipe.send(taken)
    await server.stop()


def _timed(step: Callable[[], Any], core: Any, times: list[float]) -> Callable[[], Any]:
    def timed() -> Any:
        num_steps, start_s = core.scheduler.stats.num_steps, time.perf_counter()
        result = step()
        if core.scheduler.stats.num_steps != num_steps:
            times.append(time.perf_counter() - start_s)
        return result

    return timed


class Pair:
    """Requests to two engines. Every prompt is new, unless it says so."""

    def __init__(self, prefill: Engine, decode: Engine, seed: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self._rng = np.random.default_rng(seed)
        self._num_requests = 0

    def request(self, prompt: Sequence[int], max_tokens: int) -> EngineCoreRequest:
        """A greedy request of its own name."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineCoreRequest(
            request_id=f"r{self._num_requests}", prompt_token_ids=list(prompt), sampling_params=params
        )

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        tokens: list[int] = self._rng.integers(10, 4000, num_tokens).tolist()
        return tokens

    async def hand_over(self, num_tokens: int, max_tokens: int) -> tuple[RequestTimings, RequestTimings]:
        """Prefill on P, decode on D; both engines' timings."""
        route: Route[EngineConnection] = Route(self.prefill.session, self.decode.session)
        async with Attempt(route, self.request(self.prompt(num_tokens), max_tokens), None) as attempt:
            async for output in attempt:
                if output.finish_reason is not None:
                    break
            prefill, decode = attempt.prefill_report, attempt.decode_report
        assert prefill is not None
        assert prefill.timings is not None
        assert decode.timings is not None
        return prefill.timings, decode.timings

    async def alone(self, target: Engine, request: EngineCoreRequest) -> float:
        """Run a request on one engine; seconds to its first token."""
        first_s, _ = await self.alone_with_cache(target, request)
        return first_s

    async def alone_with_cache(self, target: Engine, request: EngineCoreRequest) -> tuple[float, int]:
        """The same, and how many of its tokens' KV was not computed."""
        start_s, first_s, num_cached_tokens = time.perf_counter(), None, 0
        async for output in target.session.submit(request):
            if first_s is None and output.new_token_ids:
                first_s = time.perf_counter() - start_s
            if output.timings is not None:
                num_cached_tokens = output.timings.num_cached_tokens
        return first_s or 0.0, num_cached_tokens


async def measure_exposed(pair: Pair, repeats: int) -> None:
    """Transfers of prompts of one, two, four and seven chunks, one after the other."""
    print("\n| chunks | tokens | transfer ms, median | exposed ms, median | p90 | exposed / transfer, median |")
    print("|---|---|---|---|---|---|")
    for num_chunks in (1, 2, 4, 7):
        num_tokens = num_chunks * _CHUNK_TOKENS
        transfers = []
        for _ in range(repeats):
            _, decode = await pair.hand_over(num_tokens, 2)
            assert decode.transfer is not None
            transfers.append(decode.transfer)
        exposed = [transfer.exposed_s for transfer in transfers]
        share = statistics.median(transfer.exposed_s / transfer.transfer_s for transfer in transfers)
        print(
            f"| {num_chunks} | {num_tokens} | {_ms(statistics.median(t.transfer_s for t in transfers))} "
            f"| {_ms(statistics.median(exposed))} | {_ms(_percentile(exposed, 90))} | {share:.1%} |"
        )


async def measure_handover(pair: Pair, repeats: int) -> None:
    """From the end of prefill to RUNNING, beside D's decode steps."""
    latencies = []
    await pair.decode.take_step_times()
    for _ in range(repeats):
        prefill, decode = await pair.hand_over(512, 8)
        latencies.append(_time_of(decode, RequestStatus.RUNNING) - prefill.status_changes[-1].at_s)
    steps = await pair.decode.take_step_times()
    print("\n| handover of 512 tokens, ms | median | p90 | decode step of D, ms, median |\n|---|---|---|---|")
    print(
        f"| end of prefill to RUNNING | {_ms(statistics.median(latencies))} | {_ms(_percentile(latencies, 90))} "
        f"| {_ms(statistics.median(steps))} |"
    )


async def measure_steps(pair: Pair, repeats: int) -> None:
    """Eight requests decode on D all the time, while P prefills for itself, or for D."""
    times: dict[str, list[float]] = {"P prefills for itself": [], "P prefills and hands over": []}
    requests = [pair.request(pair.prompt(32), 1900) for _ in range(8)]
    background = [asyncio.create_task(pair.alone(pair.decode, request)) for request in requests]
    await asyncio.sleep(1.0)
    for round_ in range(max(4, repeats // 3)):
        for name in times if round_ % 2 else reversed(times):
            await pair.decode.take_step_times()
            if name == "P prefills for itself":
                await pair.alone(pair.prefill, pair.request(pair.prompt(1024), 1))
            else:
                await pair.hand_over(1024, 2)
            times[name] += await pair.decode.take_step_times()
    print("\n| D's steps, ms | steps | p50 | p90 | p99 |\n|---|---|---|---|---|")
    for name, seconds in times.items():
        percentiles = " | ".join(_ms(_percentile(seconds, percent)) for percent in (50, 90, 99))
        print(f"| {name} | {len(seconds)} | {percentiles} |")
    for request in requests:
        pair.decode.session.abort(request.request_id)
    await asyncio.gather(*background)


async def measure_fetch(pair: Pair, repeats: int) -> None:
    """The first token on P of a prompt that nobody knows, and of one whose KV D has."""
    print("\n| prefix | computed, ms to the first token | fetched from D | times fetched |\n|---|---|---|---|")
    peer = pair.decode.session.descriptor.kv_address
    for num_tokens in (128, 512, 1536):
        computed, fetched = [], []
        for _ in range(max(5, repeats // 2)):
            prompt = pair.prompt(num_tokens)
            await pair.alone(pair.decode, pair.request(prompt, 1))
            asked = replace(pair.request([*prompt, 7], 1), prefix_source=PrefixSource(peer, num_tokens))
            fetched.append(await pair.alone_with_cache(pair.prefill, asked))
            computed.append(await pair.alone(pair.prefill, pair.request(pair.prompt(num_tokens + 1), 1)))
        _print_prefix(num_tokens, computed, fetched)


async def measure_host_tier(small: Engine, repeats: int) -> None:
    """The first token of a prompt whose KV was evicted to host memory, beside one that nobody knows."""
    print("\n| prefix | computed, ms to the first token | from host memory | times loaded |\n|---|---|---|---|")
    pair = Pair(small, small, seed=2)
    for num_tokens in (128, 512, 1536):
        computed, loaded = [], []
        for _ in range(max(5, repeats // 2)):
            prompt = pair.prompt(num_tokens)
            await pair.alone(small, pair.request(prompt, 1))
            computed.append(await pair.alone(small, pair.request(pair.prompt(num_tokens + 1), 1)))
            for _ in range(2):
                await pair.alone(small, pair.request(pair.prompt(1900), 1))
            loaded.append(await pair.alone_with_cache(small, pair.request([*prompt, 7], 1)))
        _print_prefix(num_tokens, computed, loaded)


def _print_prefix(num_tokens: int, computed: Sequence[float], brought: Sequence[tuple[float, int]]) -> None:
    """Print how long prefixes took; of those to be brought, only the ones that were brought whole count."""
    seconds = [first_s for first_s, num_cached_tokens in brought if num_cached_tokens >= num_tokens]
    median = _ms(statistics.median(seconds)) if seconds else "-"
    print(f"| {num_tokens} tokens | {_ms(statistics.median(computed))} | {median} | {len(seconds)} of {len(brought)} |")


def _time_of(timings: RequestTimings, status: RequestStatus) -> float:
    return next(change.at_s for change in timings.status_changes if change.status is status)


def _percentile(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    main()
