"""Tests of cluster/api/grpc/conversions/batch.py."""

from __future__ import annotations

import asyncio

import pytest

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.api.grpc.conversions.batch import batch_from_proto
from cluster.api.grpc.conversions.generate import request_from_proto, token_ids_from_proto
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.options import BatchOptions, make_batch_request
from cluster.images.sources import images_of
from cluster.requests.samples import split
from cluster.settings.input_limits import InputLimits


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (generate_pb2.SamplingParams(), None),
        (generate_pb2.SamplingParams(json_schema="{}"), StructuredOutputParams("json_schema", "{}")),
        (generate_pb2.SamplingParams(json_object=True), StructuredOutputParams("json_object")),
        (generate_pb2.SamplingParams(json_object=False), StructuredOutputParams("json_object", "false")),
        (generate_pb2.SamplingParams(regex="a"), StructuredOutputParams("regex", "a")),
        (
            generate_pb2.SamplingParams(choice=generate_pb2.Choices(choices=["é", 'b"'])),
            StructuredOutputParams("choice", '["é", "b\\""]'),
        ),
        (generate_pb2.SamplingParams(grammar=""), StructuredOutputParams("grammar", "")),
    ],
)
async def test_structured_output_is_read(
    params: generate_pb2.SamplingParams, expected: StructuredOutputParams | None
) -> None:
    request = await request_from_proto("a", generate_pb2.GenerateRequest(text="x", sampling_params=params), None)
    assert request.sampling.structured_output == expected


async def test_each_conversation_of_a_batch_has_images_of_its_own_and_each_text_those_of_the_call() -> None:
    chats = make_batch_request([[("user", ["?", picture])] for picture in (b"one", b"two")], 2, None, {})
    texts = make_batch_request(["<image>", "<image>!"], 1, None, {"images": [b"same"]})
    images = [
        [
            one.image.data
            for sample in split(await batch_from_proto("r", batch, None), InputLimits())
            for one in images_of(sample.request)
        ]
        for batch in (chats, texts)
    ]
    assert images == [[b"one", b"one", b"two", b"two"], [b"same", b"same"]]


async def test_a_prompt_may_be_cut_and_have_special_tokens_or_not() -> None:
    plain = await request_from_proto("a", generate_pb2.GenerateRequest(text="x"), None)
    assert (plain.truncate_prompt_tokens, plain.add_special_tokens) == (None, None)
    message = generate_pb2.GenerateRequest(text="x", truncate_prompt_tokens=0, add_special_tokens=False)
    asked = await request_from_proto("a", message, None)
    assert (asked.truncate_prompt_tokens, asked.add_special_tokens) == (0, False)
    options: BatchOptions = {"truncate_prompt_tokens": -1, "add_special_tokens": True}
    batch = await batch_from_proto("a", make_batch_request(["x", "y"], 1, None, options), None)
    assert (batch.each.truncate_prompt_tokens, batch.each.add_special_tokens) == (-1, True)


async def test_a_long_list_of_tokens_is_read_in_slices_between_which_the_event_loop_runs() -> None:
    token_ids = [number % 1000 for number in range(200_000)]
    message = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=token_ids))
    num_turns, is_read = 0, False

    async def count_turns() -> None:
        nonlocal num_turns
        while not is_read:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    read = await token_ids_from_proto(message.token_ids.ids)
    is_read = True
    await counting
    assert read == token_ids
    assert num_turns >= 3


async def test_an_empty_list_of_tokens_is_read() -> None:
    assert await token_ids_from_proto(generate_pb2.TokenIds().ids) == []
