"""A message that is decoded in slices is the same as one that is decoded at once, or is refused as well."""

from __future__ import annotations

import random
from typing import Final

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.grpc.wire import decode_in_slices
from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2
from cluster.errors import InvalidRequest
from tests.attacks.wire import inside
from tests.cluster.api.grpc.answering import methods
from tests.cluster.api.grpc.test_fuzz import Filler, broken, mutated

TYPES: Final = [method.input_type for method in methods()]
LONG: Final = "x" * 100_000
_Request, _TokenIds = generate_pb2.GenerateRequest, generate_pb2.TokenIds


async def same_as_at_once(message_type: type[Message], data: bytes) -> Message | None:
    """Decode in both ways, and compare; None: both refuse the message."""
    descriptor: Descriptor = message_type.DESCRIPTOR  # type: ignore[assignment]  # upb has a class of its own
    try:
        expected = message_type.FromString(data)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            await decode_in_slices(descriptor, data)
        return None
    decoded = await decode_in_slices(descriptor, data)
    # Serialized, numbers that are no number are equal, too.
    assert decoded.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    return decoded


@pytest.mark.parametrize("slice_bytes", [10, 16, 100])
@settings(max_examples=30)
@given(draw=st.randoms(use_true_random=False), index=st.integers(0, len(TYPES) - 1))
async def test_any_message_is_the_same(slice_bytes: int, draw: random.Random, index: int) -> None:
    # The longest number has ten bytes: no number is longer than a slice.
    message_type = GetMessageClass(TYPES[index])
    data = Filler(draw).message(TYPES[index]).SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.api.grpc.wire._SLICE_BYTES", slice_bytes)
        for one in (data, mutated(TYPES[index], data, draw), broken(data, draw)):
            await same_as_at_once(message_type, one)


@pytest.mark.parametrize(
    "message",
    [
        embed_pb2.EmbedRequest(
            inputs=[
                generate_pb2.Prompt(token_ids=_TokenIds(ids=[7, 70_000, 2**32 - 1] * 50_000)),
                generate_pb2.Prompt(text="x"),
                generate_pb2.Prompt(token_ids=_TokenIds(ids=range(90_000))),
            ],
            dimensions=5,
        ),
        _Request(
            chat=generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="user", content="hello")] * 20_000)
        ),
        _Request(text=LONG, images=[generate_pb2.Image(data=LONG.encode())] * 3, output_token_ids=[400] * 100_000),
    ],
    ids=["inputs", "chat", "texts"],
)
async def test_a_large_message_is_the_same(message: Message) -> None:
    assert await same_as_at_once(type(message), message.SerializeToString()) == message


async def test_the_last_prompt_of_a_message_counts() -> None:
    tokens = _Request(token_ids=_TokenIds(ids=[300] * 100_000)).SerializeToString()
    text = _Request(text=LONG).SerializeToString()
    for data, kind in ((tokens + text, "text"), (text + tokens, "token_ids"), (tokens + text + tokens, "token_ids")):
        decoded = await same_as_at_once(_Request, data)
        assert decoded is not None
        assert decoded.WhichOneof("prompt") == kind
    twice = await same_as_at_once(_Request, tokens + tokens)
    assert isinstance(twice, _Request)
    assert len(twice.token_ids.ids) == 200_000


@pytest.mark.parametrize("head", [b"\xbb\x3e", b"\xbb\x3e\xbb\x3e\xbc\x3e"], ids=["a group", "a group in a group"])
async def test_a_large_field_of_an_unknown_group_is_no_field_of_the_message(head: bytes) -> None:
    hidden = inside(_Request, "token_ids", inside(_TokenIds, "ids", b"\x07" * 100_000))
    decoded = await same_as_at_once(_Request, head + hidden + b"\xbc\x3e")
    assert decoded is not None
    assert decoded.WhichOneof("prompt") is None
    assert await same_as_at_once(_Request, head + hidden) is None
    assert await same_as_at_once(_Request, hidden + b"\xbc\x3e") is None


async def test_bytes_in_an_unknown_group_need_not_be_the_message_whose_number_they_have() -> None:
    hidden = inside(_Request, "token_ids", b"\xff" * 100_000)
    decoded = await same_as_at_once(_Request, b"\xbb\x3e" + hidden + b"\xbc\x3e")
    assert decoded is not None
    assert decoded.WhichOneof("prompt") is None


async def test_a_large_entry_of_a_map_is_no_message_of_its_own() -> None:
    entry = inside(generate_pb2.SamplingParams, "logit_bias", b"\x08\x05" * 50_000 + b"\x15\0\0\x80\x3f")
    decoded = await same_as_at_once(_Request, inside(_Request, "sampling_params", entry))
    assert isinstance(decoded, _Request)
    assert decoded.sampling_params.logit_bias == {5: 1.0}


async def test_numbers_that_do_not_end_are_refused() -> None:
    assert await same_as_at_once(_Request, inside(_Request, "output_token_ids", b"\xff" * 100_000)) is None
    assert await same_as_at_once(_Request, inside(_Request, "output_token_ids", b"\x01" * 70_000 + b"\xff")) is None
