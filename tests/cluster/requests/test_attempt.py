"""One attempt of a request, on engines that the test plays.

Tests of cluster/requests/engine_stream.py.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import DeadlineExceeded, EngineFailed, OutputsDiverged
from cluster.observability.request_records import RecordQuery
from cluster.parameters.generation import EngineReport, GenerateChunk
from cluster.routing.request_record import RequestRecord
from kv_transfer.params import EngineAddress, HandoffRanks, KVTransferParams, TransferRole
from tests.cluster.serving_setup import HELLO, assert_nothing_is_left, collect, decode_timings, make_pair, text_of
from tests.fakes import FakeEngine

ALPHABET = "abcdefghijkl"


async def test_both_engines_get_the_request_with_a_ticket_for_the_same_transfer() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))

    producer, consumer = await pair.next_requests()

    ticket = producer.kv_transfer_params
    assert ticket is not None
    decode_address = EngineAddress("d0", 7, "d0.example:1")
    prefill_address = EngineAddress("p0", 7, "p0.example:1")
    ranks = HandoffRanks(*(engine.descriptor.handoff_rank for engine in (pair.prefill, pair.decode)))
    assert ranks.producer < ranks.consumer
    assert ticket == KVTransferParams(ticket.transfer_id, 0, TransferRole.PRODUCER, decode_address, ranks=ranks)
    assert consumer.kv_transfer_params == replace(ticket, role=TransferRole.CONSUMER, peer=prefill_address)
    assert replace(consumer, kv_transfer_params=ticket) == producer
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)


async def test_a_token_that_overtakes_the_first_one_waits_for_it() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.decode.send(consumer, 1, "bc", finish_reason=FinishReason.LENGTH)
    await asyncio.sleep(0)
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)

    assert [chunk.text for chunk in await collecting] == ["a", "bc"]


async def test_a_token_that_both_engines_send_comes_once() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 0, "ab", finish_reason=FinishReason.LENGTH)

    chunks = await collecting
    assert [(chunk.first_position, chunk.text) for chunk in chunks] == [(0, "a"), (1, "b")]


async def test_where_the_decode_engine_does_all_of_it_the_prefill_engine_is_let_go() -> None:
    """It has refused the handoff, for instance since a role was switched; the client does not notice."""
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.decode.send(consumer, 0, "a")
    pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)

    assert "".join([chunk.text for chunk in await collecting]) == "ab"
    assert pair.prefill.aborted == [producer.request_id]
    assert_nothing_is_left(pair)


async def test_a_first_token_that_ends_the_request_ends_it_everywhere() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "!", finish_reason=FinishReason.STOP, stop_token_id=ord("!"))

    [chunk] = await collecting
    assert chunk.end is not None
    assert (chunk.end.finish_reason, chunk.end.stop_reason, chunk.text) == (FinishReason.STOP, ord("!"), "")
    assert pair.decode.aborted == [consumer.request_id]
    assert_nothing_is_left(pair)


async def test_a_consumer_that_lets_go_first_does_not_end_the_request() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.decode.let_go(consumer)
    await asyncio.sleep(0)
    pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)

    assert text_of(await collecting) == "a"
    assert_nothing_is_left(pair)


async def test_a_lost_prefill_engine_leaves_the_request_to_the_decode_engine() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    _, consumer = await pair.next_requests()

    pair.prefill.lose()
    await asyncio.sleep(0)
    pair.decode.send(consumer, 0, "ab", finish_reason=FinishReason.LENGTH, timings=decode_timings())

    [chunk] = await collecting
    assert chunk.text == "ab"
    assert chunk.end is not None
    assert chunk.end.timings.prefill == EngineReport("p0", None)
    assert chunk.end.usage.num_cached_tokens == 1
    (data,) = pair.serving.find_records(RecordQuery(HELLO.request_id, None))
    assert RequestRecord.from_bytes(data).attempts[0].prefill_failure == "engine p0 is lost: connection reset"
    assert_nothing_is_left(pair)


async def test_a_prefill_that_fails_after_its_token_was_sent_leaves_no_trace_in_thetext_of() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a")
    pair.prefill.send(producer, 1, "", finish_reason=FinishReason.ERROR, error="out of blocks")
    pair.decode.send(consumer, 0, "ab", finish_reason=FinishReason.LENGTH)

    assert text_of(await collecting) == "ab"


async def test_a_lost_decode_engine_ends_the_attempt() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, _ = await pair.next_requests()

    pair.decode.lose()

    with pytest.raises(EngineFailed, match="engine d0 is lost: connection reset") as raised:
        await collecting
    assert (raised.value.can_resume, raised.value.num_new_tokens) == (True, 0)
    assert pair.prefill.aborted == [producer.request_id]
    assert_nothing_is_left(pair)


async def test_an_error_of_the_decode_engine_is_the_clients_to_know() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 1, "", finish_reason=FinishReason.ERROR, error="NaN in its logits")

    with pytest.raises(EngineFailed, match="engine d0 gave the request up: NaN in its logits") as raised:
        await collecting
    assert not raised.value.can_resume
    assert_nothing_is_left(pair)


async def test_an_engine_that_drops_a_request_for_its_deadline_is_not_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(replace(HELLO, timeout_s=60.0))))
    producer, consumer = await pair.next_requests()
    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.send(consumer, 1, "b")
    for _ in range(20):
        await asyncio.sleep(0)

    loop = asyncio.get_running_loop()
    later_s = loop.time() + 61.0
    pair.decode.send(consumer, 2, "", finish_reason=FinishReason.ABORT, error="deadline exceeded")
    # The engine's word is in before the timer of this end has gone off.
    monkeypatch.setattr(loop, "time", lambda: later_s)

    with pytest.raises(DeadlineExceeded):
        await collecting
    assert_nothing_is_left(pair)


async def test_a_gap_that_nobody_can_fill_is_an_error() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    _, consumer = await pair.next_requests()

    pair.decode.send(consumer, 1, "b")
    await asyncio.sleep(0)
    pair.prefill.lose()

    with pytest.raises(EngineFailed, match="position 0 of the output is missing"):
        await collecting
    assert pair.decode.aborted == [consumer.request_id]
    assert_nothing_is_left(pair)


async def test_engines_that_disagree_on_a_token_are_an_error() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a")
    pair.decode.send(consumer, 0, "b")

    with pytest.raises(OutputsDiverged, match="position 0"):
        await collecting
    assert_nothing_is_left(pair)


async def test_engines_that_both_let_go_are_an_error() -> None:
    pair = make_pair()
    collecting = asyncio.create_task(collect(pair.serving.generate(HELLO)))
    producer, consumer = await pair.next_requests()

    pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
    pair.decode.let_go(consumer)

    with pytest.raises(EngineFailed, match="dropped the request before it was finished"):
        await collecting
    assert_nothing_is_left(pair)


@given(
    prefill_words=st.lists(st.sampled_from(["token", "again", "hand over", "end", "error", "lose"]), max_size=4),
    decode_words=st.lists(st.sampled_from(["token", "again", "end", "error", "lose", "let go"]), max_size=6),
    is_decode_next=st.lists(st.booleans(), max_size=10),
)
def test_whatever_the_engines_say_the_client_gets_the_output_in_order_and_nothing_is_left(
    prefill_words: list[str], decode_words: list[str], is_decode_next: list[bool]
) -> None:
    async def run() -> None:
        pair = make_pair()
        received: list[GenerateChunk] = []

        async def read() -> None:
            async with aclosing(pair.serving.generate(HELLO)) as chunks:
                async for chunk in chunks:
                    received.append(chunk)  # noqa: PERF401 (what came before a failure counts)

        reading = asyncio.create_task(read())
        producer, consumer = await pair.next_requests()
        prefill = _Speaker(pair.prefill, producer, first_position=0)
        decode = _Speaker(pair.decode, consumer, first_position=1)
        turns = [*is_decode_next, *[False] * len(prefill_words), *[True] * len(decode_words)]
        for is_decode in turns:
            speaker, words = (decode, decode_words) if is_decode else (prefill, prefill_words)
            if words:
                speaker.say(words.pop(0))
                await asyncio.sleep(0)
        # Whoever still waits for an engine leaves; whoever was refused has heard why.
        reading.cancel()
        [result] = await asyncio.gather(reading, return_exceptions=True)

        assert result is None or isinstance(result, asyncio.CancelledError | EngineFailed)
        text = text_of(received)
        assert text == ALPHABET[: len(text)]
        assert [chunk.first_position for chunk in received if chunk.token_ids] == sorted(
            {chunk.first_position for chunk in received if chunk.token_ids}
        )
        assert_nothing_is_left(pair)

    asyncio.run(run())


class _Speaker:
    """An engine that says the next letter of the alphabet at its position, or something else."""

    def __init__(self, engine: FakeEngine, request: EngineCoreRequest, first_position: int) -> None:
        self._engine = engine
        self._request = request
        self._position = first_position

    def say(self, word: str) -> None:
        engine, request, position = self._engine, self._request, self._position
        match word:
            case "token":
                engine.send(request, position, ALPHABET[position])
                self._position += 1
            case "again":
                engine.send(request, 0, ALPHABET[:position])
            case "hand over":
                engine.send(request, position, ALPHABET[position], end_cause=EndCause.HANDED_OVER)
            case "end":
                engine.send(request, position, ALPHABET[position], finish_reason=FinishReason.LENGTH)
            case "error":
                engine.send(request, position, "", finish_reason=FinishReason.ERROR, error="broken")
            case "lose":
                engine.lose()
            case "let go":
                engine.let_go(request)
