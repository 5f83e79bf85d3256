"""Load for a long time, and what it leaves behind.

Engines, two ingresses, each with both APIs, and their clients are one process, so that whatever grows, grows here. The
load comes in rounds; after each one everything has to be given back, and the process is measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import gt
from pathlib import Path
from typing import Final

import psutil

from actors.engine_server import EngineServer
from actors.process.garbage_collection import collect_seldom, leave_out_what_is_loaded
from cluster.api.grpc.server import IngressServer
from cluster.client import GenerateClient
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.text.tokenizing import MAX_CHARS_ALONE, NUM_THREADS, off_event_loop
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import TransferRole
from tests.cluster.serving_setup import make_ingress_server
from tests.engine_pair import engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.reference import greedy_tokens, random_prompt
from tests.soak.http_visits import HttpServers, http_visit

NUM_ROUNDS: Final = 12
NUM_WARM_ROUNDS: Final = 4
_KINDS: Final = ("read", "read", "read slowly", "left")
_LENGTHS: Final = ((5, 3), (12, 40), (40, 16), (90, 8), (150, 24), (200, 2))
"""Tokens of a prompt, and of its answer."""
_TOKENIZED_PART: Final = 0.2
_WORDS: Final = random.Random(1).sample([*map("".join, itertools.product("bdfgk", "aeiou", "lmnrst"))], 100)
_NUM_WORDS: Final = (10, 200, 2000)
"""The longest text is tokenized on a thread."""
_NUM_PROMPTS: Final = 3
"""The number of prompts of each length."""
_RESTART_INTERVAL_S: Final = 1.5
_IDLE_TIMEOUT_S: Final = 60.0
_NUM_THREADS: Final = 6
COUNTS: Final = ("num_fds", "num_threads", "num_tasks")
_SETTLE_INTERVAL_S: Final = 0.1
_SETTLE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """num_clients: at each API; pause_s: of each of them between two visits, at most"""

    num_clients: int
    pause_s: float


BUSY: Final = Load(num_clients=8, pause_s=0.0)
"""All that a core can do."""
PACED: Final = Load(num_clients=3, pause_s=1.2)
"""About a third of a core, beside other tests."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that the process holds while nothing is asked."""

    rss_mib: float
    num_fds: int
    num_threads: int
    num_tasks: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """The figures of COUNTS."""
        return self.num_fds, self.num_threads, self.num_tasks


@dataclass(slots=True)
class SoakResult:
    """footprints: after each round; counts: of what was done, by its kind"""

    footprints: list[Footprint] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def mistakes(self) -> list[str]:
        """Return what has grown since the warm-up, beyond what is allowed."""
        before, after = self.footprints[NUM_WARM_ROUNDS - 1], self.footprints[NUM_WARM_ROUNDS:]
        worst = max(footprint.rss_mib for footprint in after)
        found = []
        if worst > 1.02 * before.rss_mib:
            found.append(f"memory grew by more than 2 %: {before.rss_mib:.1f} -> {worst:.1f} MiB")
        for name, first, last in zip(COUNTS, before.counts, after[-1].counts, strict=True):
            if last > first:
                found.append(f"{name} grew: {first} -> {last}")
        return found


async def soak(directory: Path, duration_s: float, load: Load = BUSY, seed: int = 1) -> SoakResult:
    """Serve a checkpoint for so long. Raises AssertionError for a wrong token, or what is not given back.

    load: after the first round, which is BUSY
    """
    transfer = KVTransferConfig(transport="tcp")
    config = engine_config(
        directory, block_size=8, num_blocks=400, max_num_batched_tokens=64, max_num_seqs=32, transfer=transfer
    )
    result, rng = SoakResult(), random.Random(seed)
    # Beforehand: computing them holds this process's event loop up, and silent engines are given up.
    for num_prompt_tokens, num_tokens in _LENGTHS:
        for number in range(_NUM_PROMPTS):
            greedy_tokens(directory, tuple(random_prompt(num_prompt_tokens, seed=number)), num_tokens)
    await _start_all_threads()
    encode = ModelTokenizer.from_directory(directory, use_fastokens=False).encode
    async with local_cluster(config) as cluster:
        ingresses = _Ingresses(cluster, result)
        await ingresses.open()
        thresholds = gc.get_threshold()
        leave_out_what_is_loaded()
        collect_seldom()
        try:
            await _link_both_ways(cluster, ingresses)
            for number in range(NUM_ROUNDS):
                round_load = load if number else BUSY
                await _Round(ingresses, directory, round_load, result, encode).run(duration_s / NUM_ROUNDS, rng)
                await _until_idle(cluster)
                result.footprints.append(await settled_footprint(result.footprints[-1] if number else None))
        finally:
            gc.set_threshold(*thresholds)
            await ingresses.close()
        for engine in cluster.engines.values():
            engine.check_integrity()
    return result


async def _start_all_threads() -> None:
    """Start those of the event loop and of tokenizing: the last would start when first needed, perhaps late."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
    all_there = threading.Barrier(_NUM_THREADS)
    await asyncio.gather(*(asyncio.to_thread(all_there.wait, _IDLE_TIMEOUT_S) for _ in range(_NUM_THREADS)))
    both_there = threading.Barrier(NUM_THREADS)
    long = MAX_CHARS_ALONE + 1
    await asyncio.gather(*(off_event_loop(long, lambda: both_there.wait(_IDLE_TIMEOUT_S)) for _ in range(NUM_THREADS)))


class _Ingresses:
    """Two ingresses of the cluster, which are cut off and come back at their ports, in turn."""

    def __init__(self, cluster: LocalCluster, result: SoakResult) -> None:
        self._cluster = cluster
        self._result = result
        self._servers: list[IngressServer] = []
        self._ports: list[int] = []
        self.http = HttpServers(cluster.serving)

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports]

    async def open(self) -> None:
        for _ in range(2):
            server = make_ingress_server(self._cluster.serving)
            self._ports.append(await server.start())
            self._servers.append(server)
            await self.http.open()

    async def restart_in_turn(self, end_s: float) -> None:
        """Until then; whoever has been cut off is open again."""
        number = 0
        while time.monotonic() + _RESTART_INTERVAL_S < end_s:
            await asyncio.sleep(_RESTART_INTERVAL_S)
            await self._restart(number)
            number = 1 - number

    async def _restart(self, number: int) -> None:
        await self._servers[number].drain(grace_s=0)
        self._servers[number] = make_ingress_server(self._cluster.serving, port=self._ports[number])
        await self._servers[number].start()
        await self.http.restart(number)
        self._result.counts["restart"] += 1

    async def close(self) -> None:
        for server in self._servers:
            await server.drain(grace_s=0)
        await self.http.close()


@dataclass(frozen=True, slots=True)
class _Round:
    """Clients who come for some time. They are new ones in each round.

    encode: makes the tokens that a text has to have
    """

    ingresses: _Ingresses
    directory: Path
    load: Load
    result: SoakResult
    encode: Callable[[str], list[int]]

    async def run(self, duration_s: float, rng: random.Random) -> None:
        end_s = time.monotonic() + duration_s
        async with (
            GenerateClient(self.ingresses.addresses, spread=True) as client,
            self.ingresses.http.clients() as http_clients,
        ):

            async def visit_by_grpc(kind: str, rng: random.Random) -> str:
                if rng.random() < _TOKENIZED_PART:
                    text = " ".join(rng.choices(_WORDS, k=rng.choice(_NUM_WORDS)))
                    assert await client.tokenize(text) == self.encode(text)
                    return "tokenized"
                prompt, expected = _question(self.directory, rng)
                await _visit(client, prompt, expected, kind, rng)
                return kind

            async def visit_by_http(kind: str, rng: random.Random) -> str:
                return await http_visit(rng.choice(http_clients), *_question(self.directory, rng), kind, rng)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.ingresses.restart_in_turn(end_s))
                for visit in (visit_by_grpc, visit_by_http):
                    for _ in range(self.load.num_clients):
                        tasks.create_task(self._visit_until(end_s, visit, random.Random(rng.random())))

    async def _visit_until(
        self, end_s: float, visit: Callable[[str, random.Random], Awaitable[str]], rng: random.Random
    ) -> None:
        while time.monotonic() < end_s:
            self.result.counts[await visit(rng.choice(_KINDS), rng)] += 1
            await asyncio.sleep(rng.uniform(0.0, self.load.pause_s))


def _question(directory: Path, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt, and its answer."""
    num_prompt_tokens, num_tokens = rng.choice(_LENGTHS)
    prompt = random_prompt(num_prompt_tokens, seed=rng.randrange(_NUM_PROMPTS))
    return prompt, greedy_tokens(directory, tuple(prompt), num_tokens)


async def _visit(
    client: GenerateClient, prompt: list[int], expected: Sequence[int], kind: str, rng: random.Random
) -> None:
    num_tokens = len(expected)
    token_ids: list[int] = []
    leaves_after = rng.randrange(num_tokens) if kind == "left" else num_tokens
    async with aclosing(client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)) as responses:
        async for response in responses:
            assert response.first_position == len(token_ids) or not response.token_ids
            token_ids += response.token_ids
            if kind == "left" and len(token_ids) > leaves_after:
                break
            if kind == "read slowly":
                await asyncio.sleep(rng.uniform(0.0, 0.05))
    assert token_ids == list(expected[: len(token_ids)])
    assert kind == "left" or len(token_ids) == num_tokens


async def _link_both_ways(cluster: LocalCluster, ingresses: _Ingresses) -> None:
    """Open both KV links, which are opened when they are first needed, and would count as growth later.

    The way back is that of prefixes: of a conversation's second turn the decode engine has more than the other.
    """
    async with GenerateClient(ingresses.addresses) as client, asyncio.timeout(_IDLE_TIMEOUT_S):
        for seed in itertools.count(_NUM_PROMPTS):
            prompt = random_prompt(40, seed=seed)
            answer = await client.complete(prompt, max_tokens=40, ignore_eos=True)
            await client.complete([*prompt, *answer.token_ids], max_tokens=1)
            await _until_idle(cluster)
            if all(_num_links(engine) == len(TransferRole) for engine in cluster.engines.values()):
                break


def _num_links(engine: EngineServer) -> int:
    stats = engine.stats.transfer_stats
    return 0 if stats is None else len(stats.links)


async def _until_idle(cluster: LocalCluster) -> None:
    """Wait until the engines say that every block is free or cached, and no request is left."""
    async with asyncio.timeout(_IDLE_TIMEOUT_S):
        while True:
            stats = [engine.stats for engine in cluster.engines.values()]
            # A call of somebody who has left may end a moment after its request has.
            if cluster.serving.num_requests_in_flight == 0 and all(
                one.num_free_blocks == one.num_blocks
                and one.num_held_reqs == one.num_running_reqs == one.num_waiting_reqs == 0
                and one.num_waiting_for_remote_kvs == 0
                for one in stats
            ):
                break
            await asyncio.sleep(0.1)


async def settled_footprint(at_most: Footprint | None = None) -> Footprint:
    """Measure what is held once what was closed is gone: gRPC has threads of its own that close its sockets.

    What still comes and goes after some seconds is taken as it is then, and what stays above at_most.
    """
    gc.collect()
    footprint = _footprint()
    end_s = time.monotonic() + _SETTLE_TIMEOUT_S
    while time.monotonic() < end_s:
        await asyncio.sleep(_SETTLE_INTERVAL_S)
        last, footprint = footprint, _footprint()
        has_grown = at_most is not None and any(map(gt, footprint.counts, at_most.counts))
        if footprint.counts == last.counts and not has_grown:
            break
    return footprint


def _footprint() -> Footprint:
    # What the allocator keeps for later is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Footprint(
        rss_mib=process.memory_info().rss / 2**20,
        num_fds=process.num_fds(),
        num_threads=threading.active_count(),
        num_tasks=len(asyncio.all_tasks()),
    )
