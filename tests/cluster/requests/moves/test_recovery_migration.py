"""A request that its decode engine has preempted goes on elsewhere, and its client sees nothing of it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from actors.core.outputs.engine_core_outputs import EndCause, Preemption
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineFailed
from cluster.observability.request_records import RecordQuery
from cluster.parameters.generation import GenerateChunk
from cluster.requests.model_versions import ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.routing.request_record import RequestRecord
from kv_transfer.params import EngineAddress, PrefixSource
from tests.cluster.serving_setup import HELLO, RecordingRouter, collect, make_serving, make_version, text_of
from tests.fakes import FakeEngine, FakePool

LENGTH = FinishReason.LENGTH
LONG = Preemption(num_computed_tokens=6, num_wait_steps=100)
FREE = SchedulerStats(num_blocks=100, block_size=16, num_free_blocks=100)


@dataclass
class Cluster:
    """One prefill engine, and decode engines of which the first is chosen first."""

    prefill: FakeEngine
    decodes: list[FakeEngine]
    pool: FakePool
    stats: dict[EngineKey, tuple[SchedulerStats, float]]
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        self.router = RecordingRouter()
        self.serving = make_serving(
            versions=ModelVersions(make_version(1, router=self.router)),
            pool=self.pool,
            recovery_policy=RecoveryPolicy(max_attempts=2, engine_timeout_s=30.0),
            migration_planner=MigrationPlanner(lambda: self.stats, lambda: 1000.0),
        )

    async def begin(self) -> tuple[asyncio.Task[list[GenerateChunk]], EngineCoreRequest]:
        """A request that has got "ab" on the first decode engine; what that was asked."""
        answer = asyncio.create_task(collect(self.serving.generate(HELLO)))
        producer, consumer = await self.prefill.next_request(), await self.decodes[0].next_request()
        self.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        self.decodes[0].send(consumer, 1, "b")
        await settle()
        return answer, consumer

    async def preempt(self) -> tuple[asyncio.Task[list[GenerateChunk]], EngineCoreRequest, EngineCoreRequest]:
        """The same, preempted and on its way to the second engine; what both were asked."""
        answer, here = await self.begin()
        self.decodes[0].preempt(here, 2, LONG)
        return answer, here, await self.decodes[1].next_request()

    def assert_over(self) -> None:
        assert self.serving.num_requests_in_flight == 0
        assert not [engine for engine in (self.prefill, *self.decodes) if engine.num_own_requests]

    def lose(self, engine: FakeEngine) -> None:
        self.pool.engines.remove(engine)
        engine.lose()


def make_cluster(num_decodes: int = 2) -> Cluster:
    prefill = FakeEngine("p0", EngineRole.PREFILL)
    decodes = [FakeEngine(f"d{number}", EngineRole.DECODE, num_other_requests=number) for number in range(num_decodes)]
    stats = {engine.descriptor.key: (FREE, 1000.0) for engine in decodes}
    return Cluster(prefill, decodes, FakePool(prefill, *decodes), stats)


async def settle() -> None:
    """Let what was sent be read."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_preempted_request_goes_on_where_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = make_cluster()
    answer, here, there = await cluster.preempt()
    first, second = cluster.decodes
    assert (there.output_token_ids, there.attempt, there.kv_transfer_params) == (list(b"ab"), 1, None)
    assert there.prefix_source == PrefixSource(EngineAddress("d0", 7, "d0.example:1"), 6)
    assert there.request_id != here.request_id
    assert first.aborted == [], "what it has there stays until it has been fetched"
    [view] = cluster.serving.requests_in_flight()
    assert (view.decode_engine, view.attempt, view.num_migrations) == ("d0", 1, 0)

    second.send(there, 2, "c")
    await settle()
    assert first.aborted == [here.request_id]
    [view] = cluster.serving.requests_in_flight()
    assert (view.decode_engine, view.attempt, view.num_migrations) == ("d1", 1, 1)
    assert cluster.serving.num_migrations == 1
    assert cluster.router.told == [("start", "p0", "d0"), ("start", "d1")], "its load counts at both engines"
    assert cluster.router.under_way == [here.request_id, there.request_id]
    second.send(there, 3, "d", finish_reason=LENGTH)
    chunks = await answer
    assert text_of(chunks) == "abcd"
    assert [chunk.first_position for chunk in chunks if chunk.token_ids] == [0, 1, 2, 3]
    assert chunks[-1].end is not None
    timings = chunks[-1].end.timings
    assert (timings.prefill and timings.prefill.engine_id, timings.decode.engine_id) == ("p0", "d1")
    assert cluster.serving.num_migrations == 1
    (data,) = cluster.serving.find_records(RecordQuery(HELLO.request_id, None))
    (attempt,) = RequestRecord.from_bytes(data).attempts
    assert attempt.decode_engine_ids == ("d0", "d1")
    assert attempt.first_token_s is not None
    assert [attempt.first_token_s <= moved_s for moved_s in attempt.moved_s] == [True]
    cluster.assert_over()
    assert cluster.router.under_way == []
    [record] = [record for record in caplog.records if record.message == "a preempted request migrates"]
    assert record.levelno == logging.INFO


async def test_the_engine_that_had_it_keeps_it_if_it_is_quicker() -> None:
    cluster = make_cluster()
    answer, here, there = await cluster.preempt()
    first, second = cluster.decodes
    first.send(here, 2, "c")
    await settle()
    assert second.aborted == [there.request_id]
    second.send(there, 2, "x")
    first.send(here, 3, "d", finish_reason=LENGTH)
    assert text_of(await answer) == "abcd"
    assert cluster.serving.num_migrations == 0
    cluster.assert_over()


async def test_what_both_engines_sent_at_once_comes_once() -> None:
    cluster = make_cluster()
    answer, here, there = await cluster.preempt()
    first, second = cluster.decodes
    await settle()
    # Not the same tokens: on a GPU two engines may differ, and one of them is then not asked any more.
    second.send(there, 2, "c")
    first.send(here, 2, "X")
    first.send(here, 3, "Y", finish_reason=LENGTH)
    await settle()
    winner, going_on = (second, there) if first.aborted else (first, here)
    winner.send(going_on, 3, "d", finish_reason=LENGTH)
    assert text_of(await answer) in ("abcd", "abXY")
    cluster.assert_over()


async def test_a_request_that_has_a_place_soon_stays() -> None:
    cluster = make_cluster()
    answer, here = await cluster.begin()
    cluster.decodes[0].preempt(here, 2, Preemption(num_computed_tokens=6, num_wait_steps=1))
    cluster.decodes[0].send(here, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    assert cluster.decodes[1].submitted == []


async def test_without_moves_it_stays() -> None:
    cluster = make_cluster()
    cluster.serving = make_serving(pool=cluster.pool)
    answer, here = await cluster.begin()
    cluster.decodes[0].preempt(here, 2, LONG)
    cluster.decodes[0].send(here, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    assert cluster.decodes[1].submitted == []


async def test_a_target_that_refuses_costs_nothing() -> None:
    cluster = make_cluster()
    answer, here, there = await cluster.preempt()
    cluster.decodes[1].send(there, 2, "", finish_reason=FinishReason.ERROR, error="it can never fit here")
    await settle()
    cluster.decodes[0].send(here, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    assert cluster.serving.num_migrations == 0
    cluster.assert_over()


async def test_a_target_that_dies_costs_nothing() -> None:
    cluster = make_cluster()
    answer, here, _ = await cluster.preempt()
    cluster.lose(cluster.decodes[1])
    await settle()
    cluster.decodes[0].send(here, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    cluster.assert_over()


async def test_if_the_engine_that_had_it_dies_the_move_saves_it() -> None:
    cluster = make_cluster()
    answer, _, there = await cluster.preempt()
    cluster.lose(cluster.decodes[0])
    await settle()
    [view] = cluster.serving.requests_in_flight()
    assert (view.decode_engine, view.attempt) == ("d1", 1)
    cluster.decodes[1].send(there, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    cluster.assert_over()


async def test_engines_that_die_of_it_one_after_the_other_are_counted_over_a_move() -> None:
    cluster = make_cluster(num_decodes=3)
    answer, _, _ = await cluster.preempt()
    cluster.lose(cluster.decodes[0])
    await settle()
    cluster.lose(cluster.decodes[1])
    with pytest.raises(EngineFailed, match="2 engines died with the request"):
        await answer
    assert cluster.decodes[2].submitted == []


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_target_that_died_counts_until_the_request_has_gone_on_without_it(goes_on: bool) -> None:
    cluster = make_cluster(num_decodes=3)
    answer, here, _ = await cluster.preempt()
    cluster.lose(cluster.decodes[1])
    await settle()
    text = "ab"
    if goes_on:
        cluster.decodes[0].send(here, 2, "c")
        await settle()
        text = "abc"
    cluster.lose(cluster.decodes[0])
    if not goes_on:
        with pytest.raises(EngineFailed, match="2 engines died with the request"):
            await answer
        return
    resumed = await cluster.decodes[2].next_request()
    assert resumed.output_token_ids == list(text.encode())
    cluster.decodes[2].send(resumed, 3, "d", finish_reason=LENGTH)
    assert text_of(await answer) == "abcd"


async def test_an_attempt_after_a_move_has_an_id_of_its_own_and_all_the_tokens() -> None:
    cluster = make_cluster(num_decodes=3)
    answer, here, there = await cluster.preempt()
    cluster.decodes[1].send(there, 2, "c")
    await settle()
    cluster.lose(cluster.decodes[1])
    producer, resumed = await cluster.prefill.next_request(), await cluster.decodes[0].next_request()
    assert (resumed.attempt, resumed.output_token_ids) == (2, list(b"abc"))
    assert len({here.request_id, there.request_id, resumed.request_id}) == 3
    [view] = cluster.serving.requests_in_flight()
    assert (view.attempt, view.num_migrations) == (2, 1)
    cluster.prefill.send(producer, 3, "d", finish_reason=LENGTH)
    assert text_of(await answer) == "abcd"
    cluster.assert_over()


async def test_a_request_moves_on_and_back_but_not_for_ever() -> None:
    cluster = make_cluster()
    answer, request = await cluster.begin()
    text, place = "ab", 0
    for _ in range(3):
        cluster.decodes[place].preempt(request, len(text), LONG)
        place = 1 - place
        request = await cluster.decodes[place].next_request()
        assert request.output_token_ids == list(text.encode())
        cluster.decodes[place].send(request, len(text), "x")
        text += "x"
        await settle()
    cluster.decodes[place].preempt(request, len(text), LONG)
    await settle()
    assert cluster.decodes[1 - place].num_unfinished_requests == 0
    cluster.decodes[place].send(request, len(text), "!", finish_reason=LENGTH)
    assert text_of(await answer) == "abxxx!"
    assert cluster.serving.num_migrations == 3
    cluster.assert_over()


async def test_a_request_whose_first_token_is_missing_stays() -> None:
    cluster = make_cluster()
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    producer, consumer = await cluster.prefill.next_request(), await cluster.decodes[0].next_request()
    cluster.decodes[0].send(consumer, 1, "b")
    cluster.decodes[0].preempt(consumer, 2, LONG)
    await settle()
    assert cluster.decodes[1].submitted == []
    cluster.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    cluster.decodes[0].send(consumer, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing_behind() -> None:
    cluster = make_cluster()
    answer, here, there = await cluster.preempt()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert (cluster.decodes[0].aborted, cluster.decodes[1].aborted) == ([here.request_id], [there.request_id])
    cluster.assert_over()


async def test_a_second_preemption_in_the_middle_of_a_move_changes_nothing() -> None:
    cluster = make_cluster(num_decodes=3)
    answer, here, there = await cluster.preempt()
    cluster.decodes[0].preempt(here, 2, LONG)
    cluster.decodes[1].preempt(there, 2, LONG)
    await settle()
    assert cluster.decodes[2].submitted == []
    cluster.decodes[1].send(there, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    cluster.assert_over()
