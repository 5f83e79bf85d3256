"""A request whose prompt waits goes on at another engine, and its client sees nothing of it.

Tests of cluster/requests/recovery.py and cluster/requests/attempt.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineFailed
from cluster.observability.request_records import RecordQuery
from cluster.parameters.generation import GenerateChunk
from cluster.requests.model_versions import ModelVersions
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.base import EngineT, Route
from cluster.routing.engine_connection import EngineRole
from cluster.routing.request_record import RequestRecord
from tests.cluster.drawn_routes import EndlessQueues
from tests.cluster.serving_setup import HELLO, RecordingRouter, collect, make_serving, make_version, text_of
from tests.fakes import FakeEngine, FakePool

LENGTH = FinishReason.LENGTH


class ChosenRoutes(RecordingRouter):
    """Sends one that waits to the engines that are named: the prefill engine, or "", and the decode engine."""

    def __init__(self) -> None:
        super().__init__()
        self.next: tuple[str, str] | None = None

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        named = {one.descriptor.engine_id: one for one in engines}
        if self.next is None or self.next[1] not in named:
            return None
        (prefill, decode), self.next = self.next, None
        self.on_leave(waiting_id)
        return Route(named.get(prefill), named[decode])


class Cluster:
    """Two engines of each role, of which p0 and d0 are chosen first, and a look that is due."""

    def __init__(self) -> None:
        self.engines = {
            name: FakeEngine(name, role, num_other_requests=int(name[1]))
            for name, role in (
                ("p0", EngineRole.PREFILL),
                ("p1", EngineRole.PREFILL),
                ("d0", EngineRole.DECODE),
                ("d1", EngineRole.DECODE),
            )
        }
        self.router, self.pool = ChosenRoutes(), FakePool(*self.engines.values())
        self.looks: list[Callable[[], None]] = []
        self.serving = make_serving(
            versions=ModelVersions(make_version(1, router=self.router)),
            pool=self.pool,
            recovery_policy=RecoveryPolicy(max_attempts=2, engine_timeout_s=30.0),
            rerouting=Rerouting(EndlessQueues(), lambda _, look: self.looks.append(look)),
        )

    async def begin(self) -> tuple[asyncio.Task[list[GenerateChunk]], EngineCoreRequest, EngineCoreRequest]:
        """A request that waits at p0 and d0; what both were asked."""
        answer = asyncio.create_task(collect(self.serving.generate(HELLO)))
        return answer, await self.engines["p0"].next_request(), await self.engines["d0"].next_request()

    def look(self, *, to: tuple[str, str]) -> None:
        """Let the request go to these engines, if it still waits."""
        self.router.next = to
        looks, self.looks = self.looks, []
        for look in looks:
            look()
        self.router.next = None

    def assert_over(self) -> None:
        assert self.serving.num_requests_in_flight == 0
        assert {name: engine.num_own_requests for name, engine in self.engines.items()} == dict.fromkeys(
            self.engines, 0
        )
        assert self.router.under_way == []
        self.looks, looks = [], self.looks
        for look in looks:
            look()
        assert self.looks == [], "nothing waits any more"

    def record(self) -> RequestRecord:
        (record,) = self.serving.find_records(RecordQuery(HELLO.request_id, None))
        return RequestRecord.from_bytes(record)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("prefill", "decode"), [("", "d1"), ("", "d0"), ("p1", "d1"), ("p1", "d0"), ("", "p1")], ids=str
)
async def test_a_request_that_waits_gets_its_tokens_where_it_goes(prefill: str, decode: str) -> None:
    cluster = Cluster()
    answer, producer, consumer = await cluster.begin()
    cluster.look(to=(prefill, decode))

    assert cluster.engines["p0"].aborted == [producer.request_id]
    assert cluster.engines["d0"].aborted == [consumer.request_id]
    again = await cluster.engines[decode].next_request()
    assert (again.request_id, again.attempt) == (f"{consumer.request_id}+1", 1)
    assert (again.output_token_ids, again.sampling_params) == ([], consumer.sampling_params)
    assert cluster.router.under_way == [again.request_id]
    if prefill:
        asked = await cluster.engines[prefill].next_request()
        assert asked.request_id == again.request_id
        cluster.engines[prefill].send(asked, 0, "a", end_cause=EndCause.HANDED_OVER)
    else:
        cluster.engines[decode].send(again, 0, "a")
    cluster.engines[decode].send(again, 1, "b", finish_reason=LENGTH)
    assert text_of(await answer) == "ab"
    cluster.assert_over()
    attempts = cluster.record().attempts
    assert [one.decode_engine_ids for one in attempts] == [("d0",), (decode,)]
    assert [one.prefill_engine_id for one in attempts] == ["p0", prefill or None]
    assert [one.failure for one in attempts] == ["", ""]
    assert attempts[0].ended_s is not None
    assert attempts[0].num_new_tokens == 0
    assert attempts[1].began_s >= attempts[0].ended_s


async def test_a_token_that_comes_from_the_engines_that_it_has_left_is_ignored() -> None:
    cluster = Cluster()
    answer, producer, _ = await cluster.begin()
    await settle()
    # The client has not got this token yet.
    cluster.engines["p0"].send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    cluster.look(to=("", "d1"))
    again = await cluster.engines["d1"].next_request()
    cluster.engines["d1"].send(again, 0, "ab", finish_reason=LENGTH)
    chunks = await answer
    assert text_of(chunks) == "ab"
    assert [chunk.first_position for chunk in chunks if chunk.token_ids] == [0]
    cluster.assert_over()


async def test_who_has_a_token_stays() -> None:
    cluster = Cluster()
    answer, producer, consumer = await cluster.begin()
    cluster.engines["p0"].send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    await settle()
    cluster.look(to=("", "d1"))
    cluster.engines["d0"].send(consumer, 1, "b", finish_reason=LENGTH)
    assert text_of(await answer) == "ab"
    assert cluster.engines["d1"].submitted == []
    cluster.assert_over()


async def test_who_has_lost_an_engine_stays_with_the_other_one() -> None:
    cluster = Cluster()
    answer, _, consumer = await cluster.begin()
    cluster.pool.engines.remove(cluster.engines["p0"])
    cluster.engines["p0"].lose()
    await settle()
    cluster.look(to=("", "d1"))
    cluster.engines["d0"].send(consumer, 0, "ab", finish_reason=LENGTH)
    assert text_of(await answer) == "ab"
    assert cluster.engines["d1"].submitted == []


async def test_it_goes_on_elsewhere_if_the_engine_dies_that_it_has_gone_to() -> None:
    cluster = Cluster()
    answer, _, _ = await cluster.begin()
    cluster.look(to=("", "d1"))
    await cluster.engines["d1"].next_request()
    cluster.pool.engines.remove(cluster.engines["d1"])
    cluster.engines["d1"].lose()
    producer, consumer = await cluster.engines["p0"].next_request(), await cluster.engines["d0"].next_request()
    assert consumer.attempt == 2
    cluster.engines["p0"].send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    cluster.engines["d0"].send(consumer, 1, "b", finish_reason=LENGTH)
    assert text_of(await answer) == "ab"
    cluster.assert_over()


async def test_it_has_as_many_attempts_as_one_that_has_stayed() -> None:
    cluster = Cluster()
    answer, _, _ = await cluster.begin()
    cluster.look(to=("", "d1"))
    await cluster.engines["d1"].next_request()
    cluster.look(to=("", "p1"))
    assert cluster.engines["p1"].submitted == [], "it has gone elsewhere once"
    for name in ("d1", "d0"):
        await settle()
        assert not answer.done()
        cluster.pool.engines.remove(cluster.engines[name])
        cluster.engines[name].lose(had_requests=False)
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(answer, 60)
    cluster.assert_over()


async def test_a_client_that_leaves_takes_it_along_wherever_it_is() -> None:
    cluster = Cluster()
    answer, _, _ = await cluster.begin()
    cluster.look(to=("p1", "d1"))
    await cluster.engines["d1"].next_request()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    cluster.assert_over()
    cluster.look(to=("", "d0"))
    assert len(cluster.engines["d0"].submitted) == 1
