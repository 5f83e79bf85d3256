"""The index of an ingress says what engines have cached, and what they have evicted since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from actors.core.requests.block_hash import BlockHash, BlockHasher, BlockHashKey, ExtraKeys
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.routing.engine_connection import EngineKey
from tests.engine_pair import engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.reference import random_prompt
from tests.trusted import TRUST

_BLOCK_SIZE = 8
_NUM_TOKENS = 4


def _hashes(prompt: list[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(_BLOCK_SIZE, BlockHashKey(TRUST.block_hash_key)).extend(hashes, prompt, ExtraKeys())
    return hashes


def _cached(cluster: LocalCluster, prompts: list[list[int]]) -> list[Mapping[EngineKey, int]]:
    """Return how many blocks of each prompt each engine has, by the engines themselves."""
    lengths: list[Mapping[EngineKey, int]] = []
    for hashes in map(_hashes, prompts):
        pools = {
            (name, 1): engine._core.scheduler.kv_cache_manager.block_pool for name, engine in cluster.engines.items()
        }
        found = {key: len(pool.find_longest_prefix(hashes, len(hashes))) for key, pool in pools.items()}
        lengths.append({key: num_blocks for key, num_blocks in found.items() if num_blocks})
    return lengths


def _known(cluster: LocalCluster, prompts: list[list[int]]) -> list[Mapping[EngineKey, int]]:
    return [cluster.prefix_index.find(_hashes(prompt)) for prompt in prompts]


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  # other threads
        await asyncio.sleep(0.02)


async def _answer(cluster: LocalCluster, prompt: list[int]) -> None:
    sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    async for _ in cluster.serving.generate(GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling)):
        pass


async def test_the_index_says_what_is_cached_after_evictions(checkpoint: Callable[[str], Path]) -> None:
    config = engine_config(checkpoint("llama"), block_size=_BLOCK_SIZE, num_blocks=24)
    config = config.model_copy(update={"kv_transfer": config.kv_transfer.model_copy(update={"transport": "auto"})})
    prompts = [random_prompt(64, seed=seed) for seed in range(6)]
    async with local_cluster(config) as cluster, asyncio.timeout(60.0):
        for prompt in prompts:
            await _answer(cluster, prompt)
        await _until(lambda: _known(cluster, prompts) == _cached(cluster, prompts))
        cached = _cached(cluster, prompts)
        assert cached[-1].keys() == {("prefill-0", 1), ("decode-0", 1)}
        assert cached[0] == {}, "6 prompts of 8 blocks do not fit into 24"
        await cluster.engines["decode-0"].reset_prefix_cache(preempt=False)
        await _until(lambda: ("decode-0", 1) not in cluster.prefix_index.find(_hashes(prompts[-1])))


async def test_the_index_knows_guesses_only_if_engines_report_nothing(checkpoint: Callable[[str], Path]) -> None:
    config = engine_config(checkpoint("llama"), block_size=_BLOCK_SIZE, num_blocks=24)
    cache = config.cache.model_copy(update={"enable_kv_events": False})
    transfer = config.kv_transfer.model_copy(update={"transport": "auto"})
    config = config.model_copy(update={"kv_transfer": transfer, "cache": cache})
    prompts = [random_prompt(64, seed=seed) for seed in range(6)]
    async with local_cluster(config) as cluster, asyncio.timeout(60.0):
        for prompt in prompts:
            await _answer(cluster, prompt)
        assert all(cluster.prefix_index.find(_hashes(prompt)) for prompt in prompts)
