"""Tests of cluster/observability/stopwatch.py, cluster/requests/in_flight.py, cluster/requests/prepared_request.py."""

import asyncio
import threading
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.access.allowance import Allowance, AllowanceLimits
from cluster.access.caller import Caller
from cluster.errors import (
    AllowanceSpent,
    DeadlineExceeded,
    InvalidRequest,
    NoEngineAvailable,
    Overloaded,
)
from cluster.parameters.generation import EngineReport, GenerateChunk, GenerateEnd, GenerateTimings, TextPrompt, Usage
from cluster.parameters.sampling_options import SamplingOptions
from cluster.routing.engine_connection import EngineRole
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.text.tokenizing import MAX_CHARS_ALONE
from tests.cluster.access.test_allowance import Clock
from tests.cluster.loop_time import let_pass
from tests.cluster.serving_setup import (
    HELLO,
    Pair,
    assert_nothing_is_left,
    collect,
    decode_timings,
    make_pair,
    make_serving,
    prefill_timings,
    text_of,
)
from tests.fakes import FakeEngine


async def test_the_first_token_comes_from_prefill_and_the_others_from_decode() -> None:
    pair = make_pair()
    chunks = pair.serving.generate(HELLO)
    first = asyncio.ensure_future(anext(chunks))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
    assert await first == GenerateChunk(
        text="a", token_ids=[97], first_position=0, seed=3, model_version=1, prompt_token_ids=list(b"hello")
    )
    pair.decode.send(consumer, 1, "bc")
    assert await anext(chunks) == GenerateChunk(text="bc", token_ids=[98, 99], first_position=1)
    pair.decode.send(consumer, 3, "d", finish_reason=FinishReason.LENGTH, timings=decode_timings())
    assert await anext(chunks) == GenerateChunk(
        text="d",
        token_ids=[100],
        first_position=3,
        end=GenerateEnd(
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
            usage=Usage(num_prompt_tokens=5, num_output_tokens=4, num_cached_tokens=2),
            # The clock was read at the start, and once for each of the three outputs.
            timings=GenerateTimings(
                1.0, 2.0 / 3, EngineReport("p0", prefill_timings()), EngineReport("d0", decode_timings())
            ),
        ),
    )
    await chunks.aclose()
    assert pair.prefill.aborted == pair.decode.aborted == []
    assert_nothing_is_left(pair)


async def test_a_stop_string_aborts_the_decode_engine_before_the_client_reads_the_end() -> None:
    pair = make_pair()
    chunks = pair.serving.generate(replace(HELLO, sampling=SamplingOptions(stop=("xyz",))))
    first = asyncio.ensure_future(anext(chunks))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    await first
    pair.decode.send(consumer, 1, "xyzzy")
    last = await anext(chunks)

    assert last.end is not None
    assert (last.text, last.token_ids, last.end.stop_reason) == ("", list(b"xyz"), "xyz")
    assert last.end.usage.num_output_tokens == 4
    assert pair.decode.aborted == [consumer.request_id]
    await chunks.aclose()
    assert_nothing_is_left(pair)


@pytest.mark.parametrize("num_tokens_before", [0, 1, 2])
async def test_a_client_that_leaves_aborts_both_engines(num_tokens_before: int) -> None:
    pair = make_pair()
    chunks = pair.serving.generate(HELLO)
    reading = asyncio.ensure_future(anext(chunks))
    producer, consumer = await pair.next_requests()
    for position in range(num_tokens_before):
        pair.prefill.send(producer, position, "a")
        await reading
        reading = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)

    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    assert (pair.prefill.aborted, pair.decode.aborted) == ([producer.request_id], [consumer.request_id])
    assert_nothing_is_left(pair)


async def test_a_client_that_stops_reading_aborts_both_engines() -> None:
    pair = make_pair()
    chunks = pair.serving.generate(HELLO)
    reading = asyncio.ensure_future(anext(chunks))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a")
    await reading

    await chunks.aclose()

    assert (pair.prefill.aborted, pair.decode.aborted) == ([producer.request_id], [consumer.request_id])
    assert_nothing_is_left(pair)


async def test_a_deadline_aborts_both_engines() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(replace(HELLO, timeout_s=600.0))))
    producer, consumer = await pair.next_requests()

    let_pass(600.0)
    with pytest.raises(DeadlineExceeded):
        await collecting

    assert producer.deadline_s == 1600.0
    assert (pair.prefill.aborted, pair.decode.aborted) == ([producer.request_id], [consumer.request_id])
    assert_nothing_is_left(pair)


async def test_an_engine_that_does_both_gets_the_request_without_a_ticket() -> None:
    engine = FakeEngine("b0", EngineRole.BOTH)
    serving = make_serving(engine)
    collecting = asyncio.create_task(collect(serving.generate(HELLO)))
    request = await engine.next_request()

    engine.send(request, 0, "ab", finish_reason=FinishReason.LENGTH, timings=prefill_timings())

    [chunk] = await collecting
    assert request.kv_transfer_params is None
    assert chunk.end is not None
    assert chunk.end.timings.prefill is None
    assert chunk.end.timings.decode == EngineReport("b0", prefill_timings())
    assert chunk.end.usage.num_cached_tokens == 2


async def test_a_resumed_request_goes_on_at_its_position() -> None:
    pair = make_pair()
    request = replace(HELLO, output_token_ids=tuple("€".encode()[:2]))
    collecting = asyncio.create_task(collect(pair.serving.generate(request)))
    producer, consumer = await pair.next_requests()

    assert producer.output_token_ids == list("€".encode()[:2])
    pair.prefill.send(producer, 2, "€".encode()[2:], end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 3, "!", finish_reason=FinishReason.LENGTH)

    chunks = await collecting
    assert [(chunk.first_position, chunk.text) for chunk in chunks] == [(2, "€"), (3, "!")]
    assert chunks[-1].end is not None
    assert chunks[-1].end.usage.num_output_tokens == 4


async def test_logprobs_go_with_their_tokens() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, _ = await pair.next_requests()
    logprobs = [TokenLogprobs([97, 98], [-0.5, -1.0], 1)]

    pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH, logprobs=logprobs)

    assert [chunk.logprobs for chunk in await collecting] == [logprobs]


async def test_a_full_house_is_told_when_to_come_again() -> None:
    pair = make_pair(max_requests_in_flight=1)
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    await pair.next_requests()

    with pytest.raises(Overloaded, match="1 requests are in flight") as raised:
        await anext(pair.serving.generate(replace(HELLO, request_id="other")))

    assert raised.value.retry_delay_s == 1.5
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert_nothing_is_left(pair)


async def test_a_longer_prompt_is_tokenized_on_a_thread_where_others_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def encode(self: ModelTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return [97]

    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    pair, tasks = make_pair(), []
    for request_id, num_chars in (("alone", MAX_CHARS_ALONE), ("beside it", MAX_CHARS_ALONE), ("short", 10)):
        request = replace(HELLO, request_id=request_id, prompt=TextPrompt("a" * num_chars))
        tasks.append(asyncio.create_task(collect(pair.serving.generate(request))))
        await pair.next_requests()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert [thread is threading.current_thread() for thread in threads] == [True, False, True]
    assert_nothing_is_left(pair)


async def test_an_id_in_flight_is_refused_and_free_again_afterwards() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, _ = await pair.next_requests()

    with pytest.raises(InvalidRequest, match="request_id is 'r'; allowed: one that no request in flight has"):
        await anext(pair.serving.generate(HELLO))

    pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
    await collecting
    again = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, _ = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
    assert text_of(await again) == "a"


async def test_tenants_may_use_the_same_ids_at_the_same_time() -> None:
    pair = make_pair()
    requests = {tenant: replace(HELLO, caller=Caller(tenant, tenant)) for tenant in ("a", "b")}
    streams = {tenant: pair.serving.generate(request) for tenant, request in requests.items()}
    firsts = {tenant: asyncio.ensure_future(anext(stream)) for tenant, stream in streams.items()}
    producers = {(await pair.next_requests())[0].tenant: None for _ in requests}
    assert producers.keys() == requests.keys()
    assert {(view.tenant, view.request_id) for view in pair.serving.requests_in_flight()} == {("a", "r"), ("b", "r")}
    assert [view.tenant for view in pair.serving.requests_in_flight(1)] == ["a"], "the oldest one"
    for request in requests.values():
        with pytest.raises(InvalidRequest, match="one that no request in flight has"):
            await anext(pair.serving.generate(request))

    firsts["b"].cancel()
    await asyncio.gather(firsts["b"], return_exceptions=True)
    assert [view.tenant for view in pair.serving.requests_in_flight()] == ["a"]
    [producer] = [request for request in pair.prefill.submitted if pair.prefill.has(request)]
    assert producer.tenant == "a"
    pair.prefill.send(producer, 0, "x", finish_reason=FinishReason.LENGTH)
    assert (await firsts["a"]).text == "x"
    await streams["a"].aclose()

    resumed = replace(requests["b"], output_token_ids=tuple(b"he"), sampling=SamplingOptions(seed=3, max_tokens=3))
    collecting = asyncio.create_task(collect(pair.serving.generate(resumed)))
    producer, _ = await pair.next_requests()
    pair.prefill.send(producer, 2, "y", finish_reason=FinishReason.LENGTH)
    assert text_of(await collecting) == "y"
    assert_nothing_is_left(pair)


async def test_without_engines_nothing_is_submitted() -> None:
    serving = make_serving()

    with pytest.raises(NoEngineAvailable, match="no engine serves"):
        await anext(serving.generate(HELLO))

    assert serving.num_requests_in_flight == 0


async def test_a_burst_is_spread_over_the_engines() -> None:
    engines = [FakeEngine(f"b{number}", EngineRole.BOTH) for number in range(4)]
    serving = make_serving(*engines)
    requests = [replace(HELLO, request_id=str(number)) for number in range(8)]
    collecting = [asyncio.create_task(collect(serving.generate(request))) for request in requests]

    for engine in engines:
        for _ in range(2):
            engine.send(await engine.next_request(), 0, "a", finish_reason=FinishReason.LENGTH)

    assert [text_of(chunks) for chunks in await asyncio.gather(*collecting)] == ["a"] * 8


async def test_a_tokens_limits_salt_and_tenant_go_with_its_requests() -> None:
    pair = make_pair()
    caller = Caller("a", "alice", highest_priority=3, allowance=Allowance("a", AllowanceLimits(concurrent=1)))
    generating = pair.serving.generate(replace(HELLO, caller=caller, cache_salt="mine"))
    first = asyncio.ensure_future(anext(generating))
    producer, _ = await pair.next_requests()

    assert (producer.tenant, producer.cache_salt, producer.priority) == ("alice", "alice/mine", 3)
    with pytest.raises(AllowanceSpent, match="1 requests at once"):
        await collect(pair.serving.generate(replace(HELLO, caller=caller, request_id="second")))

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await generating.aclose()
    assert caller.allowance.num_running == 0
    assert_nothing_is_left(pair)


async def test_prompt_and_output_are_charged_to_the_token() -> None:
    pair = make_pair()
    clock = Clock()
    caller = Caller("a", "alice", allowance=Allowance("a", AllowanceLimits(tokens_per_s=1.0, burst_s=1.0), clock))
    chunks = asyncio.create_task(collect(pair.serving.generate(replace(HELLO, caller=caller))))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 1, "bc", finish_reason=FinishReason.LENGTH)
    await chunks

    with pytest.raises(AllowanceSpent) as raised:
        caller.allowance.begin()
    assert raised.value.retry_delay_s == len("hello") + len("abc") - 1.0


async def test_prompts_that_would_make_too_many_tokens_wait_are_refused_until_one_has_begun() -> None:
    prefill, decode = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
    pair = Pair(prefill, decode, make_serving(prefill, decode, max_waiting_tokens=8))
    first = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()
    with pytest.raises(Overloaded, match="5 tokens of prompts wait, and no more than 8 may"):
        await collect(pair.serving.generate(replace(HELLO, request_id="second")))

    second = pair.serving.generate(replace(HELLO, request_id="third"))
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
    await first
    third = asyncio.ensure_future(anext(second))
    await pair.next_requests()
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    await second.aclose()
    assert_nothing_is_left(pair)
