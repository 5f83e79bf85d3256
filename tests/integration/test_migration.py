"""A decode engine that is short of blocks hands requests to one that has room, with their KV, and no token changes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import count, islice
from pathlib import Path

import pytest

from actors.config import EngineConfig
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from kv_transfer.config import KVTransferConfig
from tests.checkpoints import RECURRENT_FAMILIES
from tests.engine_pair import engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.integration.test_leaks import until_idle
from tests.reference import greedy_tokens, logprobs_after, random_prompt

pytestmark = pytest.mark.timeout(300)

_BLOCK_SIZE = 8
_NUM_TOKENS = 100
_MAX_WAVES = 12
"""On a busy machine an engine's counters may be too old to be trusted at the very moment."""
_CheckpointOf = Callable[[str], Path]


def _config(directory: Path, num_blocks: int, *, overlap: bool) -> EngineConfig:
    return engine_config(
        directory,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_batched_tokens=64,
        overlap=overlap,
        transfer=KVTransferConfig(transport="tcp"),
    )


@asynccontextmanager
async def unequal_cluster(
    directory: Path, *, migrates: bool = True, overlap: bool = False
) -> AsyncIterator[LocalCluster]:
    """decode-0 has room for two requests of full length, and decode-1 for many. In the end all blocks are free."""
    roomy, narrow = _config(directory, 400, overlap=overlap), _config(directory, 44, overlap=overlap)
    async with local_cluster(roomy, narrow, roomy, migrates_preempted=migrates) as cluster:
        yield cluster
        for name, stats in (await until_idle(cluster)).items():
            assert stats.num_free_blocks == stats.num_blocks, name
            cluster.engines[name].check_integrity()


def _request(request_id: str, prompt: list[int], num_tokens: int = _NUM_TOKENS) -> GenerateRequest:
    sampling = SamplingOptions(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt=TokenPrompt(prompt), sampling=sampling)


async def _answer(cluster: LocalCluster, index: int, directory: Path) -> None:
    prompt = random_prompt(60, seed=index)
    token_ids: list[int] = []
    async with aclosing(cluster.serving.generate(_request(f"r{index}", prompt))) as chunks:
        async for chunk in chunks:
            assert not chunk.token_ids or chunk.first_position == len(token_ids)
            token_ids += chunk.token_ids
    assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)


def _clear_seeds(directory: Path) -> Iterator[int]:
    """Prompts whose answers have no two best tokens that are nearly as likely: a state that is computed again differs.

    By up to 1e-4 in logits, since other chunks lead to it.
    """
    for seed in count():
        prompt = random_prompt(60, seed=seed)
        answer = greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
        best = logprobs_after(directory, tuple(prompt + answer[:-1]))[len(prompt) - 1 :].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-3:
            yield seed


async def _answer_all(cluster: LocalCluster, indices: Iterable[int], directory: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index in indices:
            tasks.create_task(_answer(cluster, index, directory))


@pytest.mark.parametrize(
    ("family", "overlap"),
    [("llama", False), ("llama", True)]
    + [
        pytest.param(family, family == "mimo", marks=pytest.mark.more)
        for family in ("gemma4", "mimo", "deepseek_v3", "granite_4_hybrid")
    ],
)
async def test_preempted_requests_move_with_their_kv_and_keep_their_tokens(
    family: str, overlap: bool, checkpoint: _CheckpointOf
) -> None:
    directory = checkpoint(family)
    # Worked out beforehand, since the cluster's event loop would wait for it.
    seeds = list(islice(_clear_seeds(directory), 24) if family in RECURRENT_FAMILIES else range(8 * _MAX_WAVES))
    async with unequal_cluster(directory, overlap=overlap) as cluster:
        for wave in range(_MAX_WAVES):
            first = 8 * wave % len(seeds)
            await _answer_all(cluster, seeds[first : first + 8], directory)
            stats = await until_idle(cluster)
            if stats["decode-1"].prefix_cache_stats.loaded:
                break
        assert cluster.serving.num_migrations > 0
        assert stats["decode-0"].num_preemptions >= cluster.serving.num_migrations
        assert stats["decode-1"].prefix_cache_stats.loaded > 0, "nothing was fetched"
        sent = stats["decode-0"].transfer_stats
        assert sent is not None
        assert sent.num_sent_blocks * _BLOCK_SIZE >= stats["decode-1"].prefix_cache_stats.loaded


async def test_with_migration_switched_off_everybody_stays(checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    async with unequal_cluster(directory, migrates=False) as cluster:
        await _answer_all(cluster, range(8), directory)
        stats = await until_idle(cluster)
        assert stats["decode-0"].num_preemptions > 0
        assert (cluster.serving.num_migrations, stats["decode-1"].prefix_cache_stats.loaded) == (0, 0)


class _MoveWatch(logging.Handler):
    """Calls somebody with the client's request id when a request begins to move."""

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "a preempted request migrates":
            self._act(record.__dict__["request_id"].rpartition("-")[0])


@contextmanager
def on_each_move(act: Callable[[str], None]) -> Iterator[None]:
    logger, watch = logging.getLogger("cluster.requests.recovery"), _MoveWatch(act)
    level = logger.level
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)


@pytest.mark.parametrize("seed", range(2))
async def test_clients_that_leave_in_the_middle_of_a_move_leave_nothing_behind(
    seed: int, checkpoint: _CheckpointOf
) -> None:
    directory, draw = checkpoint("llama"), random.Random(seed)
    clients: dict[str, asyncio.Task[None]] = {}
    left: list[str] = []

    def leave(request_id: str) -> None:
        delay_s = draw.choice([None, 0.0, draw.uniform(0.0, 0.03)])
        if delay_s is not None:
            left.append(request_id)
            asyncio.get_running_loop().call_later(delay_s, clients[request_id].cancel)

    async with unequal_cluster(directory, overlap=bool(seed % 2)) as cluster:
        with on_each_move(leave):
            while not left and len(clients) < 16 * _MAX_WAVES:
                for index in range(len(clients), len(clients) + 16):
                    clients[f"r{index}"] = asyncio.create_task(_answer(cluster, index, directory))
                    await asyncio.sleep(draw.expovariate(30.0))
                outcomes = await asyncio.gather(*clients.values(), return_exceptions=True)
        for request_id, outcome in zip(clients, outcomes, strict=True):
            assert outcome is None or (request_id in left and isinstance(outcome, asyncio.CancelledError)), outcome
        assert left
        assert cluster.serving.num_requests_in_flight == 0


@pytest.mark.parametrize("engine_id", ["decode-0", "decode-1"])
async def test_an_engine_that_is_lost_in_the_middle_of_a_move_costs_no_token(
    engine_id: str, checkpoint: _CheckpointOf
) -> None:
    """decode-0 is the one that requests leave, decode-1 the one that they go to."""
    directory = checkpoint("llama")
    losses: list[asyncio.Task[None]] = []

    async with unequal_cluster(directory) as cluster:

        def lose(_: str) -> None:
            rest = cluster.pool.membership.without_engine(engine_id, 1)
            losses.append(asyncio.create_task(cluster.pool.update(rest)))

        with on_each_move(lose):
            for wave in range(_MAX_WAVES):
                await _answer_all(cluster, range(8 * wave, 8 * wave + 8), directory)
                if losses:
                    break
        await asyncio.gather(*losses)
        assert losses
