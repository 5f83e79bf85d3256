"""Engines that cannot hand over to each other, behind one ingress and without Ray: each serves alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.engine_server import EngineServer
from cluster.api.process import IngressProcess
from cluster.client import GenerateClient
from cluster.config import ClusterConfig
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership
from cluster.settings.ingress import IngressConfig
from cluster.settings.routing import RoutingConfig
from kv_transfer.config import KVTransferConfig
from tests.cluster.serving_setup import FakeAdmin
from tests.engine_pair import engine_config
from tests.integration.idle_engines import until_all_idle
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST, member

pytestmark = pytest.mark.timeout(120)

_NUM_TOKENS = 64
_MANY_TOKENS = 300
_TIMEOUT_S = 60.0


@dataclass
class Fleet:
    """Engines of one model. Those that check their chunks can hand over to each other, and the others to theirs."""

    directory: Path
    process: IngressProcess
    engines: dict[str, EngineServer] = field(default_factory=dict)
    descriptors: dict[str, EngineDescriptor] = field(default_factory=dict)

    async def start(self, engine_id: str, *, checksum: bool = False) -> None:
        config = engine_config(self.directory, transfer=KVTransferConfig(checksum=checksum))
        engine = self.engines[engine_id] = EngineServer(config, engine_id, 1, TRUST)
        address = await engine.start("127.0.0.1")
        role = EngineRole(engine_id.partition("-")[0])
        self.descriptors[engine_id] = EngineDescriptor(engine_id, 1, role, address, pairing=engine.facts.pairing)

    async def serve(self, *engine_ids: str) -> None:
        """These engines are the members from now on."""
        members = tuple(self.descriptors[engine_id] for engine_id in engine_ids)
        await self.process.update_membership(Membership(self.process.membership_version + 1, members))


@asynccontextmanager
async def fleet(directory: Path, **checksums: bool) -> AsyncIterator[tuple[Fleet, GenerateClient]]:
    """Engines by name, with an underscore, and a client of the ingress. All of them serve."""
    process = IngressProcess(
        ClusterConfig(ingress=IngressConfig(port=0), routing=RoutingConfig(mode=RoutingMode.DISAGGREGATE)),
        FakeAdmin(),
        member(),
    )
    engines = Fleet(directory, process)
    try:
        for name, checksum in checksums.items():
            await engines.start(name.replace("_", "-"), checksum=checksum)
        await engines.serve(*engines.engines)
        port = (await process.start(next(iter(engines.engines.values())).facts)).grpc
        async with GenerateClient(f"127.0.0.1:{port}") as client:
            yield engines, client
    finally:
        await process.drain(0)
        for engine in engines.engines.values():
            await engine.stop()


async def tokens_of(client: GenerateClient, prompt: list[int]) -> list[int]:
    responses = client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [token_id async for response in responses for token_id in response.token_ids]


async def test_requests_go_to_engines_that_can_hand_over_and_status_names_those_that_cannot(
    checkpoint: Callable[[str], Path],
) -> None:
    directory = checkpoint("llama")
    prompts = [random_prompt(30 + 9 * number, seed=number) for number in range(6)]
    async with fleet(directory, prefill_0=False, decode_0=False, decode_1=True) as (engines, client):
        async with asyncio.timeout(_TIMEOUT_S):
            answers = await asyncio.gather(*(tokens_of(client, prompt) for prompt in prompts))
        status = await client.status()
        await until_all_idle(engines.engines.values())
        computed = {name: engine.stats.num_prompt_tokens_computed for name, engine in engines.engines.items()}
        transfers = [engine.stats.transfer_stats for engine in engines.engines.values()]

    assert answers == [greedy_tokens(directory, tuple(prompt), _NUM_TOKENS) for prompt in prompts]
    [pair] = status.refused_pairs
    assert (pair.prefill_engine, pair.decode_engine) == ("prefill-0", "decode-1")
    assert pair.reason == "checksum: False at prefill-0, True at decode-1"
    assert computed["prefill-0"] > 0
    assert computed["decode-0"] == 0, "all that it had came from the prefill engine"
    assert computed["decode-1"] > 0, "it serves alone"
    assert sum(stats.num_transfers_failed for stats in transfers if stats is not None) == 0, "nobody was refused"


async def test_a_stream_goes_on_at_once_at_the_prefill_engine_when_the_only_decode_engine_is_gone(
    checkpoint: Callable[[str], Path],
) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(100, seed=9)
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    async with fleet(directory, prefill_0=False, decode_0=False) as (engines, client), asyncio.timeout(_TIMEOUT_S):
        responses = client.generate(prompt, max_tokens=_MANY_TOKENS, temperature=0.0, ignore_eos=True)
        async for response in responses:
            assert response.first_position == len(token_ids) or not response.token_ids
            token_ids += response.token_ids
            arrivals_s.append(time.monotonic())
            if len(token_ids) >= 10 and engines.process.membership_version == 1:
                await engines.serve("prefill-0")
        status = await client.status()

    assert response.timings.decode_engine.engine_id == "prefill-0"
    assert token_ids == greedy_tokens(directory, tuple(prompt), _MANY_TOKENS)
    # It has not waited for another decode engine, which it would do for a minute.
    assert max(later - sooner for sooner, later in itertools.pairwise(arrivals_s)) < 10.0
    assert [engine.engine_id for engine in status.engines] == ["prefill-0"]
