from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, Preemption
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import EngineLost
from cluster.sessions.request_stream import RequestStream

REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())


def output(position: int, num_tokens: int = 1, **more: object) -> EngineCoreOutput:
    token_ids = list(range(position, position + num_tokens))
    return EngineCoreOutput(request_id="r", attempt=0, new_token_ids=token_ids, first_position=position, **more)  # type: ignore[arg-type]  # fields


async def read(stream: RequestStream) -> list[EngineCoreOutput]:
    return [one async for one in stream]


async def test_a_reader_that_keeps_up_gets_each_output_as_it_came() -> None:
    stream = RequestStream(REQUEST)
    reading = asyncio.create_task(read(stream))
    sent = [output(position) for position in range(40)]
    for one in sent:
        stream.put(one)
        await asyncio.sleep(0)
    stream.end()
    assert await reading == sent


async def test_what_is_not_read_takes_a_few_objects_however_much_it_is() -> None:
    stream = RequestStream(REQUEST)
    for position in range(5000):
        stream.put(output(position))
    stream.put(output(5000, finish_reason=FinishReason.LENGTH))

    outputs = await read(stream)
    assert len(outputs) == 16
    assert [token_id for one in outputs for token_id in one.new_token_ids] == list(range(5001))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].first_position == 15


async def test_logprobs_stay_with_their_tokens_and_a_preemption_by_itself() -> None:
    stream = RequestStream(REQUEST)
    for position in range(30):
        if position == 25:
            stream.put(output(position, 0, preemption=Preemption(3, 4)))
        stream.put(output(position, logprobs=[TokenLogprobs([position], [-1.0], 1)]))
    stream.end()

    outputs = await read(stream)
    assert [one.preemption is not None for one in outputs].count(True) == 1
    tokens = [token_id for one in outputs for token_id in one.new_token_ids]
    logprobs = [entry.token_ids[0] for one in outputs for entry in one.logprobs or ()]
    assert tokens == logprobs == list(range(30))


async def test_what_came_before_an_engine_was_lost_is_read_first() -> None:
    stream = RequestStream(REQUEST)
    stream.put(output(0))
    stream.end(EngineLost("d0", "gone"))
    assert (await anext(stream)).new_token_ids == [0]
    for _ in range(2):
        with pytest.raises(EngineLost):
            await anext(stream)


async def test_nothing_follows_the_end() -> None:
    stream = RequestStream(REQUEST)
    stream.put(output(0, finish_reason=FinishReason.STOP))
    stream.end(EngineLost("d0", "gone"))
    assert len(await read(stream)) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@given(sizes=st.lists(st.integers(1, 4), max_size=60), reads=st.lists(st.integers(0, 60), max_size=20))
def test_however_it_is_read_every_token_comes_once_and_in_order(sizes: list[int], reads: list[int]) -> None:
    async def run() -> list[int]:
        stream, position = RequestStream(REQUEST), 0
        tokens: list[int] = []
        for index, size in enumerate(sizes):
            stream.put(output(position, size))
            position += size
            if index in reads:
                one = await anext(stream)
                assert one.first_position == len(tokens)
                tokens += one.new_token_ids
        stream.end()
        return tokens + [token_id for one in await read(stream) for token_id in one.new_token_ids]

    assert asyncio.run(run()) == list(range(sum(sizes)))
