"""Clusters of models with several KV groups, latents or recurrent states: engines die under requests, and change roles.

test_migration.py moves requests of such models, and tests/chaos does all of it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.routing.engine_connection import EngineRole
from tests.integration.promises import CUT, NUM_PROMPT_TOKENS, NUM_TOKENS, ask_all, engines_config, token_ids_of
from tests.integration.recovering_cluster import RecoveringCluster, recovering_cluster
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.more

FAMILIES: Final = ("gemma4", "gemma3n", "mimo", "deepseek_v3", "bamba")
NUM_REQUESTS: Final = 6
TIMEOUT_S: Final = 60.0
PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE


class Asker:
    """Asks a cluster, and compares every answer with generate()."""

    def __init__(self, cluster: RecoveringCluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._num_asked = 0

    async def ask(self, num_requests: int) -> None:
        """Ask for so many answers at once, each to a prompt of its own."""
        seeds = range(self._num_asked, self._num_asked + num_requests)
        self._num_asked += num_requests
        prompts = {f"r{seed}": random_prompt(NUM_PROMPT_TOKENS, seed=seed) for seed in seeds}
        sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        requests = {
            name: GenerateRequest(request_id=name, prompt=TokenPrompt(prompt), sampling=sampling)
            for name, prompt in prompts.items()
        }
        for name, answer in (await ask_all(self._cluster, requests)).items():
            assert token_ids_of(answer) == greedy_tokens(self._directory, tuple(prompts[name]), NUM_TOKENS), name

    async def ask_one_that_is_handed_over(self, producer: str) -> None:
        """Ask once, and see the producer send KV."""
        before = num_sent_bytes(self._cluster, producer)
        await self.ask(1)
        await self._cluster.until_idle()
        assert num_sent_bytes(self._cluster, producer) > before, f"{producer} has sent nothing"


def num_sent_bytes(cluster: RecoveringCluster, engine_id: str) -> int:
    stats = cluster.engines[engine_id].stats.transfer_stats
    return 0 if stats is None else stats.num_sent_bytes


@pytest.mark.parametrize("family", FAMILIES)
async def test_engines_that_swap_their_roles_under_load_hand_over_the_other_way(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    config = engines_config(directory)
    config = config.model_copy(update={"kv_transfer": config.kv_transfer.model_copy(update={"checksum": True})})
    async with recovering_cluster(config, ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        asker = Asker(cluster, directory)
        async with asyncio.timeout(2 * TIMEOUT_S):
            await asker.ask_one_that_is_handed_over("prefill-0")
            for roles in ((DECODE, PREFILL), (PREFILL, DECODE)):
                async with asyncio.TaskGroup() as tasks:
                    await _ask_until_it_computes(asker, cluster, tasks)
                    await _change_roles(cluster, roles)
                    tasks.create_task(asker.ask(NUM_REQUESTS))
                await cluster.until_idle()
                await asker.ask_one_that_is_handed_over("decode-0" if roles[0] is DECODE else "prefill-0")


async def _ask_until_it_computes(asker: Asker, cluster: RecoveringCluster, tasks: asyncio.TaskGroup) -> None:
    """Begin to ask; return in the middle of it, while an engine's step is held, and let that step go on."""
    barrier = cluster.barriers["prefill-0"]
    barrier.close(2)
    tasks.create_task(asker.ask(NUM_REQUESTS))
    await barrier.is_reached.wait()
    barrier.open()


async def _change_roles(cluster: RecoveringCluster, roles: Sequence[EngineRole]) -> None:
    for engine_id, role in zip(("prefill-0", "decode-0"), roles, strict=True):
        await cluster.change_role(engine_id, role)


@pytest.mark.parametrize("dying", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_that_dies_during_handoffs_costs_no_token(
    family: str, dying: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    successor = dying.replace("0", "1")
    async with recovering_cluster(engines_config(directory), ["prefill-0", "decode-0", successor]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        barrier = cluster.barriers["prefill-0"]
        barrier.close(3)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(Asker(cluster, directory).ask(NUM_REQUESTS))
            await barrier.is_reached.wait()
            await cluster.join(successor)
            await cluster.kill(dying)
            barrier.open()
        await cluster.until_idle()


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_that_dies_in_the_middle_of_answers_costs_no_token(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    async with recovering_cluster(engines_config(directory), ["prefill-0", "decode-0", "decode-1"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        cluster.tap.close(["decode-0"], CUT, NUM_REQUESTS)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(Asker(cluster, directory).ask(NUM_REQUESTS))
            await cluster.tap.has_stopped.wait()
            await cluster.join("decode-1")
            await cluster.kill("decode-0")
        await cluster.until_idle()
        assert num_sent_bytes(cluster, "prefill-0") > 0
