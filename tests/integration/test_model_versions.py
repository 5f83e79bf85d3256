"""Two models of one family serve side by side while one takes the other's place, behind one ingress and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from actors.engine_server import EngineServer
from cluster.api.process import IngressProcess
from cluster.client import CallFailed, GenerateClient
from cluster.config import ClusterConfig
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.settings.ingress import IngressConfig
from kv_transfer.config import KVTransferConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.serving_setup import FakeAdmin
from tests.engine_pair import engine_config
from tests.integration.recovering_cluster import StepBarrier
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST, member

pytestmark = pytest.mark.timeout(120)

_NUM_TOKENS = 48
_MANY_TOKENS = 400
"""So many that an answer is not through before its engines are gone."""
_TIMEOUT_S = 60.0


@dataclass
class TwoModels:
    """directories, engines: by model version."""

    process: IngressProcess
    directories: dict[int, Path]
    membership: Membership = field(default_factory=lambda: Membership(0, ()))
    engines: dict[int, dict[EngineRole, tuple[EngineDescriptor, EngineServer]]] = field(default_factory=dict)
    barriers: dict[str, StepBarrier] = field(default_factory=dict)

    async def start(self, version: int) -> None:
        """Start a prefill and a decode engine of this version; they serve once they are let in."""
        config = engine_config(self.directories[version], transfer=KVTransferConfig())
        for role in (EngineRole.PREFILL, EngineRole.DECODE):
            engine_id = f"{role}-{version}"
            engine = EngineServer(config, engine_id, 1, TRUST)
            address = await engine.start("127.0.0.1")
            assert engine._core is not None
            engine._core.executor = self.barriers[engine_id] = StepBarrier(engine._core.executor)
            descriptor = EngineDescriptor(
                engine_id, 1, role, address, pairing=engine.facts.pairing, model_version=version
            )
            self.engines.setdefault(version, {})[role] = descriptor, engine

    async def let_in(self, version: int) -> None:
        """Let its engines serve, in one snapshot with the model."""
        facts = self.engines[version][EngineRole.DECODE][1].facts
        members = self.membership.with_model(ServedModel(version, str(self.directories[version]), facts))
        for descriptor, _ in self.engines[version].values():
            members = members.with_engine(descriptor)
        await self.publish(members)

    async def drain(self, version: int) -> None:
        """Its engines get no new requests."""
        members = self.membership
        for descriptor, _ in self.engines[version].values():
            members = members.with_draining(*descriptor.key)
        await self.publish(members)

    async def remove(self, version: int) -> None:
        """Its engines are gone."""
        members = self.membership
        for descriptor, _ in self.engines[version].values():
            members = members.without_engine(*descriptor.key)
        await self.publish(members)

    async def publish(self, membership: Membership) -> None:
        self.membership = membership
        await self.process.update_membership(membership)

    def expected(self, version: int, prompt: list[int], num_tokens: int = _NUM_TOKENS) -> list[int]:
        return greedy_tokens(self.directories[version], tuple(prompt), num_tokens)


@dataclass
class Stream:
    """The answer that one client has got. error: how it ended, if not well."""

    prompt: list[int]
    num_tokens: int = _NUM_TOKENS
    token_ids: list[int] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    error: CallFailed | None = None

    async def run(self, client: GenerateClient) -> None:
        responses = client.generate(self.prompt, max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        try:
            async for response in responses:
                assert response.first_position == len(self.token_ids) or not response.token_ids
                self.token_ids += response.token_ids
                self.has_begun.set()
        except CallFailed as error:
            self.error = error


@asynccontextmanager
async def two_models(tmp_path: Path, checkpoint: Callable[[str], Path]) -> AsyncIterator[tuple[TwoModels, str]]:
    """The first model serves; yields the ingress's address."""
    directories = {1: checkpoint("llama"), 2: make_checkpoint("llama", tmp_path / "new", seed=1)}
    process = IngressProcess(ClusterConfig(ingress=IngressConfig(port=0)), FakeAdmin(), member())
    models = TwoModels(process, directories)
    try:
        await models.start(1)
        await models.let_in(1)
        port = (await process.start(models.engines[1][EngineRole.DECODE][1].facts)).grpc
        yield models, f"127.0.0.1:{port}"
    finally:
        await process.drain(0)
        for barrier in models.barriers.values():
            barrier.open()
        for engines in models.engines.values():
            for _, engine in engines.values():
                await engine.stop()


def prompts(num: int, seed: int) -> list[list[int]]:
    return [random_prompt(20 + 7 * index, seed=seed) for index in range(num)]


async def answer_all(client: GenerateClient, streams: list[Stream]) -> None:
    async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(client))


async def test_every_answer_is_one_models_own_and_load_goes_over_to_the_new_one(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    async with two_models(tmp_path, checkpoint) as (models, address), GenerateClient(address) as client:
        before = [Stream(prompt) for prompt in prompts(2, seed=1)]
        await answer_all(client, before)
        await models.start(2)
        await models.let_in(2)
        between = [Stream(prompt) for prompt in prompts(6, seed=2)]
        await answer_all(client, between)
        await models.drain(1)
        after = [Stream(prompt) for prompt in prompts(2, seed=3)]
        await answer_all(client, after)
        await models.remove(1)
        after += [last := Stream(prompts(1, seed=4)[0])]
        await answer_all(client, [last])
        status = await client.status()

        versions = []
        for stream in (*before, *between, *after):
            assert stream.error is None
            [version] = [version for version in (1, 2) if stream.token_ids == models.expected(version, stream.prompt)]
            versions.append(version)
        assert versions[:2] == [1, 1]
        assert versions[-3:] == [2, 2, 2]
        assert sorted(versions[2:-3]) == [1, 1, 1, 2, 2, 2], "both have one decode engine"
        assert [engine.model_version for engine in status.engines] == [2, 2]
        assert [(model.version, model.engines, model.requests) for model in status.models] == [(2, 2, 0)]


async def test_streams_of_a_model_that_leaves_end_and_are_never_continued_by_the_other(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    async with two_models(tmp_path, checkpoint) as (models, address), GenerateClient(address) as client:
        await models.start(2)
        cut = [Stream(prompt, _MANY_TOKENS) for prompt in prompts(4, seed=5)]
        early = [Stream(prompt) for prompt in prompts(4, seed=6)]
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for stream in cut:
                tasks.create_task(stream.run(client))
            for stream in cut:
                await stream.has_begun.wait()
            # However long it takes until the engine is gone, no answer is through by then.
            models.barriers["decode-1"].close(0)
            for stream in early:
                tasks.create_task(stream.run(client))
            await asyncio.sleep(0)
            # Asked after them: they are at the first model's engines when its answer is here.
            assert len((await client.status()).engines) == 2
            await models.let_in(2)
            status = await client.status()
            pairs = status.refused_pairs
            assert sum(request.model_version == 1 for request in status.requests) >= len(cut)
            await models.drain(1)
            await models.remove(1)
            models.barriers["decode-1"].open()

        for stream in cut:
            assert stream.error is not None
            assert stream.error.code is grpc.StatusCode.INTERNAL
            assert "its model version 1 has left the cluster" in str(stream.error)
        for stream in early:
            if stream.token_ids and stream.error is not None:
                cut.append(stream)
            else:
                assert stream.error is None
                assert stream.token_ids == models.expected(2, stream.prompt)
        for stream in cut:
            num_tokens = len(stream.token_ids)
            assert 0 < num_tokens < stream.num_tokens
            assert stream.token_ids == models.expected(1, stream.prompt, num_tokens)
        assert {(pair.prefill_engine, pair.decode_engine, pair.reason) for pair in pairs} == {
            ("prefill-1", "decode-2", "model version: 1 at prefill-1, 2 at decode-2"),
            ("prefill-2", "decode-1", "model version: 2 at prefill-2, 1 at decode-1"),
        }
