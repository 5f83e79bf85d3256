"""Engines of every role come, change their role, drain and die at random under requests that take every way.

Each answer is gapless and of one model, every request ends, and no engine is left with anything. Engines hand over as
real ones do: a consumer reserves, a producer computes once its consumer has, and both refuse by the rule of ranks.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from graphlib import TopologicalSorter
from typing import Final, Literal, cast

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from actors.core.loads.handoff_rank import HandoffRank
from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutput, Preemption
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest, FinishReason, Request
from actors.model_facts import ModelFacts
from cluster.errors import ClusterError, EngineFailed, NoEngineAvailable
from cluster.parameters.generation import GenerateChunk
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import ModelVersions
from cluster.requests.moves.migration import EngineStats, MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import Way
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from kv_transfer.params import KVTransferParams, TransferRole
from tests.cluster.drawn_routes import DrawnRoutes, EndlessQueues, way_of
from tests.cluster.serving_setup import HELLO, make_serving, make_version
from tests.fakes import FakeEngine, FakePool
from tests.kv_transfer.connected_workers import LAYOUT

NUM_TOKENS: Final = 5
FACTS: Final = ModelFacts(64, 257, (256,), LAYOUT)
ROLES: Final = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH)
FREE: Final = SchedulerStats(num_blocks=100, block_size=16, num_free_blocks=100)
LONG: Final = Preemption(num_computed_tokens=6, num_wait_steps=100)
Word = Literal["start", "ask", "resume", "step", "set role", "preempt", "reroute", "drain", "leave", "die", "abort"]
Action = tuple[Word, int]
"""An event, and a number that says to whom it happens, and how."""
WORDS: Final[list[Word]] = ["start", "ask", "ask", "ask", "resume", "step", "step", "step", "step", "step"]
"""The usual ones."""
_RARE: Final[list[Word]] = ["preempt", "preempt", "reroute", "reroute", "drain", "leave", "die", "abort"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([*WORDS, "set role", "set role", *_RARE]),
        st.integers(0, 11),
    ),
    min_size=10,
    max_size=50,
)
STARTS = st.lists(st.sampled_from(ROLES), min_size=1, max_size=4)


class Handoff(Enum):
    """How far a handoff has come; SENT: the consumer goes on; GIVEN_UP: the consumer does all of it."""

    OPEN = auto()
    RESERVED = auto()
    SENT = auto()
    GIVEN_UP = auto()


@dataclass
class Part:
    """An engine's part of a request. transfer_role: None if no handoff is under way here"""

    request: EngineCoreRequest
    transfer_role: TransferRole | None
    kv_transfer_params: KVTransferParams | None
    position: int


class WorkingEngine(FakeEngine):
    """Gives the tokens of its model version, one for each request when it is told to step."""

    def __init__(self, engine_id: str, role: EngineRole, version: int, handoffs: dict[str, Handoff]) -> None:
        super().__init__(engine_id, role, version)
        self.is_draining = False
        self.parts: dict[str, Part] = {}
        self._handoffs = handoffs
        self._rank = HandoffRank(cast(dict[str, Request], self.parts), {})

    def set_role(self, role: EngineRole) -> None:
        self._descriptor = replace(self._descriptor, role=role)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        assert not self.is_draining, "it gets no new requests"
        version = self.descriptor.model_version
        assert request.output_token_ids == [50 * version + one for one in range(len(request.output_token_ids))]
        outputs = super().submit(request)
        ticket = request.kv_transfer_params
        part = Part(request, None if ticket is None else ticket.role, ticket, len(request.output_token_ids))
        objection = self._rank.find_objection(cast(Request, part))
        self.parts[request.request_id] = part
        if ticket is not None and ticket.role is TransferRole.CONSUMER:
            # The producer of a consumer that has refused waits until it is aborted.
            self._handoffs[str(ticket.transfer_id)] = Handoff.OPEN if objection else Handoff.RESERVED
            part.transfer_role = None if objection else ticket.role
        elif objection is not None:
            self.give_up(part)
            self.send(request, part.position, [], finish_reason=FinishReason.ERROR, error=objection)
        return outputs

    def give_up(self, part: Part) -> None:
        """End a producer's part; its consumer is told."""
        assert part.kv_transfer_params is not None
        self._handoffs[str(part.kv_transfer_params.transfer_id)] = Handoff.GIVEN_UP
        del self.parts[part.request.request_id]

    def step(self) -> None:
        for part in list(self.parts.values()):
            if not self.has(part.request):
                self.forget(part)
            elif part.transfer_role is TransferRole.PRODUCER:
                self._produce(part)
            else:
                self._decode(part)

    def forget(self, part: Part) -> None:
        if part.transfer_role is TransferRole.PRODUCER:
            self.give_up(part)
        else:
            self.parts.pop(part.request.request_id, None)

    def lose(self, *, has_left: bool = False, had_requests: bool = True) -> None:
        super().lose(has_left=has_left, had_requests=had_requests)
        for part in list(self.parts.values()):
            self.forget(part)

    def decoding(self) -> list[Part]:
        return [part for part in self.parts.values() if part.transfer_role is None and self.has(part.request)]

    def _produce(self, part: Part) -> None:
        assert part.kv_transfer_params is not None
        handoff = str(part.kv_transfer_params.transfer_id)
        if self._handoffs[handoff] is Handoff.RESERVED:
            self._say(part, end_cause=EndCause.HANDED_OVER)
            self._handoffs[handoff] = Handoff.SENT
            self.parts.pop(part.request.request_id, None)

    def _decode(self, part: Part) -> None:
        if part.transfer_role is TransferRole.CONSUMER:
            assert part.kv_transfer_params is not None
            handoff = self._handoffs[str(part.kv_transfer_params.transfer_id)]
            if handoff is Handoff.RESERVED:
                return
            part.transfer_role = None
            part.position += handoff is Handoff.SENT
            if part.position == NUM_TOKENS:  # The producer's token was the last one.
                self.let_go(part.request)
                del self.parts[part.request.request_id]
                return
        self._say(part)

    def _say(self, part: Part, end_cause: EndCause | None = None) -> None:
        request, position = part.request, part.position
        is_last = position + 1 == NUM_TOKENS
        reason, cause = (FinishReason.LENGTH, None) if is_last else (None, end_cause)
        token_ids = [50 * self.descriptor.model_version + position]
        self.send(request, position, token_ids, finish_reason=reason, end_cause=cause)
        part.position += 1
        if is_last:
            self.parts.pop(request.request_id, None)


class NotingRoutes(DrawnRoutes):
    """Counts the ways."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: Counter[Way] = Counter()
        self.num_reroutes = 0

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        route = super().reroute(waiting_id, again, engines)
        self.num_reroutes += route is not None
        return route

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        self.ways[way_of(route)] += 1


class Cluster:
    """A membership, its engines, and what an ingress makes of them."""

    def __init__(self) -> None:
        self.membership = Membership(0, ())
        self.engines: dict[EngineKey, WorkingEngine] = {}
        self.handoffs: dict[str, Handoff] = {}
        self.router = NotingRoutes()
        self.versions = ModelVersions(make_version(1, router=self.router))
        self.pool = FakePool()
        self.num_started = 0
        self.serving = make_serving(
            pool=self.pool,
            recovery_policy=RecoveryPolicy(max_attempts=100, engine_timeout_s=30.0),
            versions=self.versions,
            migration_planner=MigrationPlanner(self.stats, lambda: 1000.0),
            rerouting=Rerouting(EndlessQueues(), lambda delay_s, look: self.looks.append(look)),
        )
        self.looks: list[Callable[[], None]] = []
        self.answers: list[asyncio.Task[list[GenerateChunk] | ClusterError]] = []
        self.left: set[int] = set()

    def stats(self) -> EngineStats:
        return dict.fromkeys(self.engines, (FREE, 1000.0))

    async def act(self, action: Action) -> None:
        word, number = action
        if word == "start":
            self.start(ROLES[number % 3], 1 + number // 9)
        elif word in ("ask", "resume"):
            self.ask(number % 3 if word == "resume" else 0)
        elif word == "step":
            for index, engine in enumerate(list(self.engines.values())):
                if number & 1 or index != number // 2:
                    engine.step()
        elif word == "preempt":
            for engine in self.engines.values():
                for part in engine.decoding()[number % 3 :]:
                    engine.preempt(part.request, part.position, LONG)
        elif word == "reroute":
            looks, self.looks = self.looks, []
            for look in looks:
                look()
        elif word == "abort" and self.answers:
            self.left.add(number % len(self.answers))
            self.answers[number % len(self.answers)].cancel()
        elif self.membership.engines:
            self.change(word, number)
        for _ in range(30):
            await asyncio.sleep(0)
        self.check()

    def change(self, word: Word, number: int) -> None:
        descriptor = self.membership.engines[number % len(self.membership.engines)]
        engine = self.engines[descriptor.key]
        if word == "set role":
            role = ROLES[number // 4]
            engine.set_role(role)
            self.publish(self.membership.with_role(*descriptor.key, role))
        elif word == "drain":
            engine.is_draining = True
            self.publish(self.membership.with_draining(*descriptor.key))
        elif word in ("leave", "die"):
            self.publish(self.membership.without_engine(*descriptor.key))
            self.engines.pop(descriptor.key).lose(has_left=word == "leave")

    def start(self, role: EngineRole, version: int = 1) -> None:
        self.num_started += 1
        engine = WorkingEngine(f"e-{self.num_started}", role, version, self.handoffs)
        self.engines[engine.descriptor.key] = engine
        model = ServedModel(version, f"checkpoint-{version}", FACTS)
        self.publish(self.membership.with_model(model).with_engine(engine.descriptor))

    def publish(self, membership: Membership) -> None:
        self.membership = membership
        for model in membership.models:
            if model.version not in self.versions:
                self.versions.put(make_version(model.version, router=self.router))
        self.versions.keep({model.version for model in membership.models})
        serving = [engine for engine in membership.engines if engine.key not in membership.draining]
        self.pool.replace(*(self.engines[engine.key] for engine in serving))

    def ask(self, num_resumed: int) -> None:
        """num_resumed: tokens of model version 1 that the client has already"""
        sampling = SamplingOptions(seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
        resumed = tuple(50 + position for position in range(num_resumed))
        request = replace(HELLO, request_id=str(len(self.answers)), sampling=sampling, output_token_ids=resumed)
        if resumed:
            request = replace(request, model_version=1)

        async def answer() -> list[GenerateChunk] | ClusterError:
            chunks: list[GenerateChunk] = []
            try:
                async for chunk in self.serving.generate(request):
                    chunks.append(chunk)
                    check_answer(chunks, num_resumed)
            except ClusterError as error:
                return error
            assert sum(len(chunk.token_ids) for chunk in chunks) == NUM_TOKENS - num_resumed
            return chunks

        self.answers.append(asyncio.create_task(answer()))

    def check(self) -> None:
        """No engines wait for each other in a circle.

        A consumer waits from its reservation on until its producer has sent or given up; it notices at its next step.
        """
        graph: TopologicalSorter[str] = TopologicalSorter()
        for engine in self.engines.values():
            for part in engine.parts.values():
                ticket = part.kv_transfer_params
                if part.transfer_role is not TransferRole.CONSUMER or ticket is None:
                    continue
                if self.handoffs[str(ticket.transfer_id)] is Handoff.RESERVED:
                    graph.add(engine.descriptor.engine_id, ticket.peer.engine_id)
        graph.prepare()

    async def finish(self) -> list[list[GenerateChunk] | ClusterError]:
        """Start engines of both roles and of every version, and step until all is over."""
        for version in sorted({1, *(model.version for model in self.membership.models)} & {1, 2}):
            if version in self.versions:
                self.start(EngineRole.PREFILL, version)
                self.start(EngineRole.DECODE, version)
        for _ in range(8 * NUM_TOKENS):
            await self.act(("step", 1))
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*self.answers, return_exceptions=True)
        for number, end in enumerate(ends):
            assert number in self.left or not isinstance(end, BaseException) or isinstance(end, ClusterError), end
        return [end for end in ends if not isinstance(end, asyncio.CancelledError)]  # type: ignore[misc]  # see above


def check_answer(chunks: list[GenerateChunk], first: int) -> None:
    """One model's tokens, each position once."""
    version = chunks[0].model_version
    assert version is not None
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == [50 * version + position for position in range(first, first + len(token_ids))]


LOST_WHILE_IT_MIGRATES: Final[list[Action]] = [
    ("ask", 0),
    *(("start", 0) for _ in range(5)),
    ("die", 0),
    ("preempt", 0),
    ("die", 0),
    ("die", 0),
]
REFUSED_BY_ITS_RANK: Final[list[Action]] = [
    *(("ask", 0) for _ in range(4)),
    ("step", 0),
    ("set role", 4),
    ("ask", 0),
    ("start", 0),
    ("set role", 0),
    ("ask", 0),
]
"""At the end a consumer does not know yet that its producer has given up, because of what that producer waits for."""


@settings(max_examples=120, deadline=None)
@example(starts=[EngineRole.PREFILL], actions=LOST_WHILE_IT_MIGRATES)
@example(starts=[EngineRole.PREFILL, EngineRole.BOTH], actions=REFUSED_BY_ITS_RANK)
@given(starts=STARTS, actions=ACTIONS)
def test_whatever_way_a_request_takes_it_ends_right_and_nothing_is_left(
    starts: list[EngineRole], actions: list[Action]
) -> None:
    async def run() -> None:
        cluster = Cluster()
        for role in starts:
            cluster.start(role)
        for action in actions:
            await cluster.act(action)
        for end in await cluster.finish():
            if isinstance(end, EngineFailed):
                # One engine has died with the request, and then all of an attempt's: two while it migrates.
                reason = r"has left the cluster|[2-4] engines died with the request|is not loaded"
                assert re.search(reason, str(end)), end
            elif isinstance(end, ClusterError):
                assert isinstance(end, NoEngineAvailable)
        assert cluster.serving.num_requests_in_flight == 0
        assert {one.descriptor.engine_id: one.num_unfinished_requests for one in cluster.engines.values()} == (
            {one.descriptor.engine_id: 0 for one in cluster.engines.values()}
        )
        for way in cluster.router.ways:
            event(way.value)
        event("reroutes" if cluster.router.num_reroutes else "no reroute")
        event("migrations" if cluster.serving.num_migrations else "no migration")

    asyncio.run(run())
