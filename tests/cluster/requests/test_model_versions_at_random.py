"""Engines of three model versions come and go at random under requests: no answer is ever of two models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.model_facts import ModelFacts
from cluster.errors import ClusterError, EngineFailed, NoEngineAvailable
from cluster.parameters.generation import GenerateChunk
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from tests.cluster.serving_setup import HELLO, make_serving, make_version
from tests.fakes import FakeEngine, FakePool
from tests.kv_transfer.connected_workers import LAYOUT

NUM_TOKENS = 4
FACTS = ModelFacts(64, 257, (256,), LAYOUT)
_USUAL = ["start", "start", "ask", "ask", "ask", "step", "step"]
Action = tuple[Literal["start", "drain", "leave", "die", "ask", "step"], int]
"""An event, and the index of the one that it happens to, among those that it can happen to."""
ACTIONS = st.lists(
    st.tuples(st.sampled_from([*_USUAL, "drain", "leave", "die"]), st.integers(0, 5)), min_size=10, max_size=40
)


class SpeakingEngine(FakeEngine):
    """Says one token of each request when it is told to: its version's hundred, and the position."""

    def __init__(self, engine_id: str, version: int) -> None:
        super().__init__(engine_id, EngineRole.BOTH, version)
        self.num_said: dict[str, int] = {}

    def speak(self) -> None:
        version = self.descriptor.model_version
        for request in self.submitted:
            position = self.num_said.setdefault(request.request_id, len(request.output_token_ids))
            _check_tokens(request, version)
            is_last = position + 1 >= NUM_TOKENS
            self.send(
                request, position, [50 * version + position], finish_reason=FinishReason.LENGTH if is_last else None
            )
            self.num_said[request.request_id] += 1
            if is_last:
                self.submitted = [other for other in self.submitted if other is not request]


def _check_tokens(request: EngineCoreRequest, version: int) -> None:
    """Check that the tokens which an engine is to go on with are its own model's."""
    assert request.output_token_ids == [50 * version + position for position in range(len(request.output_token_ids))]


class Cluster:
    """The controller's and the ingress's part of it: a membership, and what the ingress makes of each snapshot."""

    def __init__(self) -> None:
        self.membership = Membership(0, ())
        self.engines: dict[EngineKey, SpeakingEngine] = {}
        self.versions = ModelVersions(make_version(1))
        self.pool = FakePool()
        policy = RecoveryPolicy(max_attempts=100, engine_timeout_s=30.0)
        self.serving = make_serving(pool=self.pool, recovery_policy=policy, versions=self.versions)
        self.answers: list[asyncio.Task[list[GenerateChunk] | ClusterError]] = []

    async def act(self, action: Action) -> None:
        what, number = action
        if what == "start":
            self.start(min(3, 1 + number // 2))
        elif what == "ask":
            self.ask()
        elif what == "step":
            for engine in self.engines.values():
                engine.speak()
        elif self.membership.engines:
            descriptor = self.membership.engines[number % len(self.membership.engines)]
            if what == "drain":
                self.publish(self.membership.with_draining(*descriptor.key))
            else:
                self.publish(self.membership.without_engine(*descriptor.key))
                self.engines.pop(descriptor.key).lose(has_left=what == "leave")
        for _ in range(30):
            await asyncio.sleep(0)

    def start(self, version: int) -> None:
        engine = SpeakingEngine(f"e{self.membership.version}", version)
        self.engines[engine.descriptor.key] = engine
        model = ServedModel(version, f"checkpoint-{version}", FACTS)
        self.publish(self.membership.with_model(model).with_engine(engine.descriptor))

    def publish(self, membership: Membership) -> None:
        self.membership = membership
        for model in membership.models:
            if model.version not in self.versions:
                self.versions.put(make_version(model.version))
        self.versions.keep({model.version for model in membership.models})
        serving = [engine for engine in membership.engines if engine.key not in membership.draining]
        self.pool.replace(*(self.engines[engine.key] for engine in serving))

    def ask(self) -> None:
        sampling = SamplingOptions(seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = replace(HELLO, request_id=str(len(self.answers)), sampling=sampling)

        async def answer() -> list[GenerateChunk] | ClusterError:
            chunks = []
            try:
                async for chunk in self.serving.generate(request):
                    chunks.append(chunk)
                    check_answer(chunks)
            except ClusterError as error:
                return error
            return chunks

        self.answers.append(asyncio.create_task(answer()))


def check_answer(chunks: list[GenerateChunk]) -> None:
    """One model's tokens, each position once, and the model is named in the first chunk only."""
    version = chunks[0].model_version
    assert version is not None
    assert [chunk.model_version for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == [50 * version + position for position in range(len(token_ids))]


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_no_answer_is_of_two_models_and_every_request_ends(actions: list[Action]) -> None:
    async def run() -> None:
        cluster = Cluster()
        cluster.start(1)
        cluster.start(1)
        for action in actions:
            await cluster.act(action)
        # Engines of every version that is known come back, so whoever still waits can end.
        for version in {1, *(model.version for model in cluster.membership.models)}:
            if version in cluster.versions:
                cluster.start(version)
        for _ in range(2 * NUM_TOKENS):
            await cluster.act(("step", 0))
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*cluster.answers)
        for end in ends:
            if isinstance(end, EngineFailed):
                assert "has left the cluster" in str(end) or "2 engines died with the request" in str(end)
            elif isinstance(end, ClusterError):
                assert isinstance(end, NoEngineAvailable)
            else:
                assert sum(len(chunk.token_ids) for chunk in end) == NUM_TOKENS
                assert end[-1].end is not None
        assert cluster.serving.num_requests_in_flight == 0
        assert all(engine.num_unfinished_requests == 0 for engine in cluster.engines.values())

    asyncio.run(run())
