"""A request outlives the engines that it runs on: no token lost, none twice, and an end to trying."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import DeadlineExceeded, EngineFailed, NoEngineAvailable
from cluster.parameters.generation import GenerateChunk
from cluster.requests.model_versions import ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineRole
from tests.cluster.loop_time import let_pass
from tests.cluster.serving_setup import (
    HELLO,
    RecordingRouter,
    collect,
    make_serving,
    make_version,
    prefill_timings,
    text_of,
)
from tests.fakes import FakeEngine, FakePool

LENGTH = FinishReason.LENGTH


@dataclass
class Cluster:
    """One prefill engine, and decode engines of which the first is chosen first."""

    prefill: FakeEngine
    decodes: list[FakeEngine]
    pool: FakePool
    serving: Serving

    def lose(self, engine: FakeEngine) -> None:
        """An engine dies: its session breaks, and it is no longer in the snapshot."""
        self.pool.engines.remove(engine)
        engine.lose()

    def lose_all(self) -> None:
        """The only decode engine dies, and the prefill engine is out of reach."""
        self.pool.engines.remove(self.prefill)
        self.lose(self.decodes[0])

    async def begin(self, decode: FakeEngine) -> tuple[asyncio.Task[list[GenerateChunk]], EngineCoreRequest]:
        """A request that has got "ab"; what its decode engine was asked."""
        answer = asyncio.create_task(collect(self.serving.generate(HELLO)))
        producer, consumer = await self.prefill.next_request(), await decode.next_request()
        self.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        decode.send(consumer, 1, "b")
        return answer, consumer


def make_cluster(
    num_decodes: int = 2, policy: RecoveryPolicy | None = None, versions: ModelVersions | None = None
) -> Cluster:
    prefill = FakeEngine("p0", EngineRole.PREFILL)
    decodes = [FakeEngine(f"d{number}", EngineRole.DECODE, num_other_requests=number) for number in range(num_decodes)]
    pool = FakePool(prefill, *decodes)
    policy = policy or RecoveryPolicy(max_attempts=4, engine_timeout_s=30.0)
    serving = make_serving(pool=pool, recovery_policy=policy, versions=versions)
    return Cluster(prefill, decodes, pool, serving)


async def settle() -> None:
    """Let what was sent be read."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_request_goes_on_at_the_next_position_when_its_decode_engine_dies() -> None:
    cluster = make_cluster()
    first, second = cluster.decodes
    answer, consumer = await cluster.begin(first)
    await settle()
    cluster.lose(first)
    producer, resumed = await cluster.prefill.next_request(), await second.next_request()

    assert (resumed.attempt, resumed.output_token_ids) == (1, list(b"ab"))
    assert resumed.request_id == producer.request_id != consumer.request_id
    assert resumed.sampling_params == consumer.sampling_params
    cluster.prefill.send(producer, 2, "c", end_cause=EndCause.HANDED_OVER)
    second.send(resumed, 3, "d", finish_reason=LENGTH)
    chunks = await answer
    assert text_of(chunks) == "abcd"
    assert [chunk.first_position for chunk in chunks if chunk.token_ids] == [0, 1, 2, 3]
    assert chunks[-1].end is not None
    assert (chunks[-1].end.usage.num_output_tokens, chunks[-1].end.timings.decode.engine_id) == (4, "d1")


async def test_the_router_is_told_of_each_attempt_as_soon_as_its_engines_have_it() -> None:
    router = RecordingRouter()
    cluster = make_cluster(versions=ModelVersions(make_version(1, router=router)))
    first, second = cluster.decodes
    answer, _ = await cluster.begin(first)
    assert router.told == [("start", "p0", "d0")]
    assert len(router.under_way) == 1
    await settle()
    cluster.lose(first)
    producer, resumed = await cluster.prefill.next_request(), await second.next_request()
    assert router.told == [("start", "p0", "d0"), ("start", "p0", "d1")]
    assert router.under_way == [resumed.request_id], "the first attempt has left its engines"
    cluster.prefill.send(producer, 2, "c", end_cause=EndCause.HANDED_OVER)
    second.send(resumed, 3, "d", finish_reason=LENGTH)
    assert text_of(await answer) == "abcd"
    assert router.told[2:] == [("end", "p0", "d1")]
    assert router.under_way == []


async def test_the_router_is_told_that_a_request_has_left_whoever_ends_it() -> None:
    router = RecordingRouter()
    cluster = make_cluster(versions=ModelVersions(make_version(1, router=router)))
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert (router.told, router.under_way) == ([("start", "p0", "d0")], [])


async def test_a_request_goes_on_at_a_prefill_engine_when_the_only_decode_engine_dies() -> None:
    cluster = make_cluster(num_decodes=1)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose(cluster.decodes[0])

    resumed = await cluster.prefill.next_request()
    assert (resumed.kv_transfer_params, resumed.output_token_ids) == (None, list(b"ab"))
    cluster.prefill.send(resumed, 2, "cd", finish_reason=LENGTH)
    assert text_of(await answer) == "abcd"


async def test_a_request_waits_for_an_engine_that_can_go_on_with_it() -> None:
    cluster = make_cluster(num_decodes=1)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose_all()
    await asyncio.wait_for(cluster.pool.is_watched.wait(), timeout=60)
    fresh = FakeEngine("d0", EngineRole.DECODE)
    cluster.pool.replace(cluster.prefill, fresh)

    resumed = await fresh.next_request()
    fresh.send(resumed, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"


async def test_a_wait_for_engines_ends() -> None:
    cluster = make_cluster(num_decodes=1, policy=RecoveryPolicy(max_attempts=4, engine_timeout_s=0.0))
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose_all()
    with pytest.raises(EngineFailed, match=r"engine d0 is lost.*no engine serves") as raised:
        await answer
    assert (raised.value.can_resume, raised.value.num_new_tokens) == (True, 2)
    assert cluster.serving.num_requests_in_flight == 0


async def test_a_wait_for_engines_ends_with_the_clients_deadline() -> None:
    cluster = make_cluster(num_decodes=1)
    answer = asyncio.create_task(collect(cluster.serving.generate(replace(HELLO, timeout_s=20.0))))
    await cluster.decodes[0].next_request()
    cluster.lose_all()
    await settle()
    let_pass(20.0)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(answer, timeout=60)


async def test_a_request_that_engines_die_of_is_given_up_after_two() -> None:
    cluster = make_cluster(num_decodes=3)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose(cluster.decodes[0])
    await cluster.decodes[1].next_request()
    cluster.lose(cluster.decodes[1])
    with pytest.raises(EngineFailed, match="2 engines died with the request") as raised:
        await answer
    assert not raised.value.can_resume
    assert cluster.decodes[2].submitted == []


async def test_an_engine_that_had_not_got_the_request_has_not_died_of_it() -> None:
    cluster = make_cluster(num_decodes=3)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose(cluster.decodes[0])
    await cluster.decodes[1].next_request()
    # It was on the same host, whose end is not yet noticed everywhere.
    cluster.pool.engines.remove(cluster.decodes[1])
    cluster.decodes[1].lose(had_requests=False)
    resumed = await cluster.decodes[2].next_request()
    cluster.decodes[2].send(resumed, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"


async def test_a_request_that_engines_go_on_with_is_not_what_they_die_of() -> None:
    cluster = make_cluster(num_decodes=4)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose(cluster.decodes[0])
    for number, position in ((1, 2), (2, 4)):
        producer, consumer = await cluster.prefill.next_request(), await cluster.decodes[number].next_request()
        cluster.prefill.send(producer, position, "x", end_cause=EndCause.HANDED_OVER)
        cluster.decodes[number].send(consumer, position + 1, "y")
        await settle()
        cluster.lose(cluster.decodes[number])
    producer, consumer = await cluster.prefill.next_request(), await cluster.decodes[3].next_request()
    cluster.prefill.send(producer, 6, "!", finish_reason=LENGTH)
    assert text_of(await answer) == "abxyxy!"


async def test_an_engine_that_was_cut_off_twice_has_not_died_twice() -> None:
    cluster = make_cluster(num_decodes=1)
    (decode,) = cluster.decodes
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    for _ in range(3):
        await cluster.prefill.next_request()
        await decode.next_request()
        decode.lose()  # Its session breaks, and is open again when the request looks for an engine.
    producer, _ = await cluster.prefill.next_request(), await decode.next_request()
    cluster.prefill.send(producer, 0, "a", finish_reason=LENGTH)
    assert text_of(await answer) == "a"


async def test_a_prefill_engine_that_died_is_forgiven_by_the_first_token() -> None:
    cluster = make_cluster(num_decodes=2)
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    consumer = await cluster.decodes[0].next_request()
    cluster.lose(cluster.prefill)
    cluster.decodes[0].send(consumer, 0, "a")
    await settle()
    cluster.lose(cluster.decodes[0])
    resumed = await cluster.decodes[1].next_request()
    cluster.decodes[1].send(resumed, 1, "b", finish_reason=LENGTH)
    assert text_of(await answer) == "ab"


async def test_cached_tokens_are_those_of_the_first_prefill() -> None:
    cluster = make_cluster()
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    producer, _ = await cluster.prefill.next_request(), await cluster.decodes[0].next_request()
    cluster.prefill.send(
        producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=replace(prefill_timings(), num_cached_tokens=2)
    )
    await settle()
    cluster.lose(cluster.decodes[0])
    producer, resumed = await cluster.prefill.next_request(), await cluster.decodes[1].next_request()
    # All of the prompt, and the output so far: the first attempt has left them there.
    cluster.prefill.send(
        producer, 1, "b", end_cause=EndCause.HANDED_OVER, timings=replace(prefill_timings(), num_cached_tokens=6)
    )
    cluster.decodes[1].send(resumed, 2, "c", finish_reason=LENGTH)
    chunks = await answer
    assert chunks[-1].end is not None
    assert chunks[-1].end.usage.num_cached_tokens == 2


async def test_attempts_are_counted() -> None:
    cluster = make_cluster(num_decodes=1, policy=RecoveryPolicy(max_attempts=2, engine_timeout_s=60.0))
    decode = cluster.decodes[0]
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    for position in (0, 1):
        producer, consumer = await cluster.prefill.next_request(), await decode.next_request()
        # A gap that nobody fills: the engines let go of it, and are not to blame for anything worse.
        decode.send(consumer, position + 2, "x")
        cluster.prefill.send(producer, position, "a", end_cause=EndCause.HANDED_OVER)
        decode.send(consumer, position + 3, "y", finish_reason=LENGTH)
    with pytest.raises(EngineFailed, match="of the output is missing") as raised:
        await answer
    assert (raised.value.can_resume, raised.value.num_new_tokens) == (True, 2)
    assert len(decode.submitted) == 2


async def test_what_is_the_requests_own_fault_is_not_tried_again() -> None:
    cluster = make_cluster()
    answer, consumer = await cluster.begin(cluster.decodes[0])
    cluster.decodes[0].send(consumer, 2, "", finish_reason=FinishReason.ERROR, error="NaN in its logits")
    with pytest.raises(EngineFailed, match="NaN in its logits"):
        await answer
    assert cluster.decodes[1].submitted == []


async def test_without_engines_a_new_request_does_not_wait() -> None:
    cluster = make_cluster(num_decodes=0)
    cluster.pool.engines.clear()
    with pytest.raises(NoEngineAvailable):
        await collect(cluster.serving.generate(HELLO))


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing_behind() -> None:
    cluster = make_cluster(num_decodes=1)
    answer, _ = await cluster.begin(cluster.decodes[0])
    await settle()
    cluster.lose_all()
    await asyncio.wait_for(cluster.pool.is_watched.wait(), timeout=60)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert cluster.serving.num_requests_in_flight == 0
    assert cluster.prefill.num_unfinished_requests == 0


async def test_a_request_that_its_decode_engine_gives_back_goes_on_however_often() -> None:
    cluster = make_cluster(num_decodes=1, policy=RecoveryPolicy(max_attempts=2, engine_timeout_s=30.0))
    decode = cluster.decodes[0]
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    for position, letter in enumerate("abcd"):
        producer, consumer = await cluster.prefill.next_request(), await decode.next_request()
        assert consumer.output_token_ids == list(b"abcd"[:position])
        cluster.prefill.send(producer, position, letter, end_cause=EndCause.HANDED_OVER)
        await settle()
        decode.send(consumer, position + 1, "", finish_reason=FinishReason.ERROR, end_cause=EndCause.INPUTS_MISSING)
    producer, consumer = await cluster.prefill.next_request(), await decode.next_request()
    cluster.prefill.send(producer, 4, "e", finish_reason=LENGTH)
    assert text_of(await answer) == "abcde"


async def test_a_request_that_is_given_back_without_a_token_is_given_up_in_the_end() -> None:
    cluster = make_cluster(num_decodes=1, policy=RecoveryPolicy(max_attempts=2, engine_timeout_s=30.0))
    answer = asyncio.create_task(collect(cluster.serving.generate(HELLO)))
    for _ in range(2):
        consumer = await cluster.decodes[0].next_request()
        cluster.decodes[0].send(consumer, 0, "", finish_reason=FinishReason.ERROR, end_cause=EndCause.INPUTS_MISSING)
    with pytest.raises(EngineFailed):
        await answer
