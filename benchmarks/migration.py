"""Measure what it is worth to hand preempted requests to another decode engine.

One prefill engine and two decode engines in processes of their own; the first decode engine has a small KV cache, the
second a large one. The same open-loop load is served with migration off and on, in turns, on the same engines.

    python -m benchmarks.migration [--model DIR] [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.model_facts import ModelFacts
from cluster.config import DEMO_MODEL
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.sessions.cluster_membership import Membership
from cluster.sessions.session_pool import SessionPool
from cluster.settings.ingress import IngressConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_HOST: Final = "127.0.0.1"
_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = {"prefill-0": 2048, "decode-0": 128, "decode-1": 2048}
_HEARTBEATS_S: Final = 1.2
"""Until an engine's counters are those of its end."""


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    arguments = parser.parse_args()
    load = Load(arguments.requests, arguments.rate, arguments.prompt_tokens, arguments.output_tokens)
    asyncio.run(measure(arguments.model, load, arguments.rounds))


@dataclass(frozen=True, slots=True)
class Load:
    """A Poisson process of requests with random prompts."""

    num_requests: int
    requests_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Outcome:
    """The times that clients saw, and the counts of the decode engines. Times in seconds."""

    total_s: list[float] = field(default_factory=list)
    end_to_end_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_migrations: int = 0
    num_computed: int = 0
    num_fetched: int = 0

    def count(self, before: Sequence[SchedulerStats], after: Sequence[SchedulerStats]) -> None:
        """Add what decode engines have done in between."""
        for old, new in zip(before, after, strict=True):
            self.num_preemptions += new.num_preemptions - old.num_preemptions
            self.num_computed += new.num_prompt_tokens_computed - old.num_prompt_tokens_computed
            self.num_fetched += new.prefix_cache_stats.loaded - old.prefix_cache_stats.loaded


async def measure(model: Path, load: Load, num_rounds: int) -> None:
    """Serve the load with migration off and on, in turns."""
    outcomes = {False: Outcome(), True: Outcome()}
    async with running_engines(model) as (pool, facts):
        for number in range(-1, num_rounds):
            for migrates in (False, True):
                # The first round opens links and warms up.
                outcome = Outcome() if number < 0 else outcomes[migrates]
                await _serve(pool, _make_serving(model, facts, pool, migrates=migrates), load, outcome, seed=number)
    _print(outcomes, num_rounds)


async def _serve(pool: SessionPool, serving: Serving, load: Load, outcome: Outcome, seed: int) -> None:
    before, draw = await _decode_stats(pool), random.Random(seed)
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.num_requests):
            prompt = [draw.randrange(3, 1000) for _ in range(load.num_prompt_tokens)]
            tasks.create_task(_ask(serving, prompt, load.num_output_tokens, outcome))
            await asyncio.sleep(draw.expovariate(load.requests_per_s))
    outcome.total_s.append(time.perf_counter() - started_s)
    outcome.count(before, await _decode_stats(pool))
    outcome.num_migrations += serving.num_migrations


async def _ask(serving: Serving, prompt: list[int], num_tokens: int, outcome: Outcome) -> None:
    # Another salt each time: no round finds what an earlier one has left in the caches.
    salt = f"{time.perf_counter_ns()}"
    sampling = SamplingOptions(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started_s = last_s = time.perf_counter()
    request = GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling, cache_salt=salt)
    num_tokens_seen = 0
    async for chunk in serving.generate(request):
        now_s = time.perf_counter()
        if chunk.token_ids:
            if num_tokens_seen:
                outcome.gaps_s += [now_s - last_s, *[0.0] * (len(chunk.token_ids) - 1)]
            num_tokens_seen, last_s = num_tokens_seen + len(chunk.token_ids), now_s
    outcome.end_to_end_s.append(time.perf_counter() - started_s)


async def _decode_stats(pool: SessionPool) -> list[SchedulerStats]:
    await asyncio.sleep(_HEARTBEATS_S)
    return [stats for (engine_id, _), (stats, _) in sorted(pool.stats().items()) if engine_id.startswith("decode")]


def _print(outcomes: dict[bool, Outcome], num_rounds: int) -> None:
    columns = ["migration", "total s, median", "end to end p50 s", "p99", "ITL p50 ms", "p99 ", "p99.9", "longest"]
    columns += ("gaps above 0.5 s", "preempted", "moved", "fetched tokens", "prompt tokens computed")
    table = Table(*columns, title=f"{num_rounds} rounds each, in turns")
    for migrates, outcome in outcomes.items():
        gaps_ms = np.array(outcome.gaps_s) * 1e3
        table.add_row(
            "on" if migrates else "off",
            f"{np.median(outcome.total_s):.2f}",
            *(f"{np.percentile(outcome.end_to_end_s, q):.2f}" for q in (50, 99)),
            *(f"{np.percentile(gaps_ms, q):.1f}" for q in (50, 99, 99.9, 100)),
            str((gaps_ms > 500).sum()),
            *(str(count) for count in (outcome.num_preemptions, outcome.num_migrations)),
            *(str(count) for count in (outcome.num_fetched, outcome.num_computed)),
        )
    Console(width=180).print(table)


def _make_serving(model: Path, facts: ModelFacts, pool: SessionPool, *, migrates: bool) -> Serving:
    description = ModelDescription.of("model", facts)
    processor = InputProcessor(description, ModelTokenizer.from_directory(model, use_fastokens=True))
    versions = ModelVersions(ModelVersion(1, processor, LeastLoadedPair()))
    planner = MigrationPlanner(pool.stats) if migrates else None
    return Serving(versions, pool, IngressConfig(), migration_planner=planner)


@asynccontextmanager
async def running_engines(model: Path) -> AsyncIterator[tuple[SessionPool, ModelFacts]]:
    """Sessions with all engines, and what the model is."""
    membership, trust = Membership(0, ()), TrustMaterial.draw()
    async with AsyncExitStack() as stack:
        for engine_id in _NUM_BLOCKS:
            address, facts = await stack.enter_async_context(_engine(model, engine_id, trust))
            role = EngineRole(engine_id.partition("-")[0])
            membership = membership.with_engine(EngineDescriptor(engine_id, 1, role, address))
        pool = SessionPool(Member(Party("ingress-0", 1), Trust(trust)), timeout_s=10.0)
        stack.push_async_callback(pool.close)
        await pool.update(membership)
        yield pool, facts


@asynccontextmanager
async def _engine(model: Path, engine_id: str, trust: TrustMaterial) -> AsyncIterator[tuple[str, ModelFacts]]:
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", device="cpu"),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS[engine_id]),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        parallel=ParallelConfig(num_threads=1),
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_engine, args=(theirs, config, engine_id, trust), daemon=True)
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(ours.recv)
        ours.send("stop")
    finally:
        ours.close()
        await asyncio.to_thread(process.join)


def _run_engine(pipe: Connection, config: EngineConfig, engine_id: str, trust: TrustMaterial) -> None:
    asyncio.run(_serve_engine(pipe, config, engine_id, trust))


async def _serve_engine(pipe: Connection, config: EngineConfig, engine_id: str, trust: TrustMaterial) -> None:
    from actors.engine_server import EngineServer

    server = EngineServer(config, engine_id, 1, Trust(trust))
    address = await server.start(_HOST)
    pipe.send((address, server.facts))
    with suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    await server.stop()


if __name__ == "__main__":
    main()
