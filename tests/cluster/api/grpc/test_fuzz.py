"""Every message of every service, filled from its descriptor: never an INTERNAL, a leak, or another's harm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attacks.wire import varint
from tests.cluster.api.grpc.answering import answering_ingress, methods, status_of

BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
METHODS = {method.name: method for method in methods()}
TEXTS = ["", "x", "hello", "d0", "decode", "tiny", 'root ::= "a"', '{"type": "object"}', "[", "é\u202e\x00", "x" * 300]
INTS = [0, 1, 2, 5, 64, 255, 257, 2**31 - 1]
FLOATS = [0.0, 1.0, 0.5, -1.0, 1e-9, 1e300, float("nan"), float("inf")]
MAX_DEPTH = 4
DRAWS = st.randoms(use_true_random=False)


class Filler:
    """Fills messages from their descriptors, mostly with what is nearly right: what is far off is refused at once."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        message = GetMessageClass(descriptor)()
        likelihood = self._draw.choice([0.1, 0.3, 0.7])
        for field in descriptor.fields:
            if self._draw.random() < likelihood or (depth == 0 and field.name in ("text", "prompts", "inputs", "each")):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, to = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            for _ in range(self._draw.choice([1, 3])):
                getattr(message, field.name)[self._scalar(key)] = self._scalar(to)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(self._draw.choice([0, 1, 2, 20])):
                if field.message_type is None:
                    values.append(self._scalar(field))
                elif depth < MAX_DEPTH:
                    values.add().CopyFrom(self.message(field.message_type, depth + 1))
        elif field.message_type is not None:
            if depth < MAX_DEPTH:
                getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        kind, draw = field.cpp_type, self._draw
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = draw.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            value = draw.choice(FLOATS)
            return min(value, 3e38) if kind == FieldDescriptor.CPPTYPE_FLOAT and value == value else value
        if field.enum_type is not None:
            return draw.choice([*(value.number for value in field.enum_type.values), 99])
        is_signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        return -draw.choice(INTS) if is_signed and draw.random() < 0.3 else draw.choice(INTS)


def broken(data: bytes, draw: random.Random) -> bytes:
    """Bytes that were a message."""
    mutable = bytearray(data or b"\x0a\x01x")
    for _ in range(draw.choice([1, 3])):
        mutable[draw.randrange(len(mutable))] = draw.randrange(256)
    return bytes(mutable[: draw.randrange(1, len(mutable) + 1)])


def mutated(descriptor: Descriptor, data: bytes, draw: random.Random) -> bytes:
    """A message with some of its fields, at any depth, sent again, left out, blown up or of another wire type.

    Unlike broken() it stays a message: what comes through decoding is what has to be checked.
    """
    fields = list(split_fields(data))
    for _ in range(draw.choice([1, 2, 4])):
        change = draw.randrange(7)
        at = draw.randrange(len(fields) + 1)
        if change == 0:  # a field that nobody knows, or one of groups
            fields.insert(at, draw.choice([b"\xb8\x3e\x01", b"\xbb\x3e\xbc\x3e", b"\xba\x3e\x03abc"]))
        elif change == 1:  # a field of the message with another wire type
            number = draw.choice([*descriptor.fields_by_number, 999])
            content = {0: b"\x01", 1: b"\xff" * 8, 2: b"\x02\x08\x01", 5: b"\xff" * 4}
            kind = draw.choice(list(content))
            fields.insert(at, varint(number << 3 | kind) + content[kind])
        elif change == 2:  # numbers out of every range
            number = draw.choice([*descriptor.fields_by_number, 999])
            fields.insert(at, varint(number << 3) + varint(draw.choice([2**31, 2**32, 2**63, 2**64 - 1])))
        elif fields and change == 3:
            fields += [draw.choice(fields)] * draw.choice([1, 50, 2000])
        elif fields and change == 4:
            fields.pop(draw.randrange(len(fields)))
        elif fields and change == 5:
            draw.shuffle(fields)
        elif fields:
            number = draw.randrange(len(fields))
            fields[number] = mutated_inside(descriptor, fields[number], draw)
    return b"".join(fields)


def mutated_inside(descriptor: Descriptor, field: bytes, draw: random.Random) -> bytes:
    """The same for a message that a field has in it; other fields stay."""
    tag, begin = read_varint(field, 0)
    found = descriptor.fields_by_number.get(tag >> 3)
    if tag & 7 != 2 or found is None or found.message_type is None:
        return field
    _, begin_of_content = read_varint(field, begin)
    inside = mutated(found.message_type, field[begin_of_content:], draw)
    return varint(tag) + varint(len(inside)) + inside


def split_fields(data: bytes) -> Iterator[bytes]:
    """The fields of a message; a group's beginning and end are fields as well."""
    at = 0
    while at < len(data):
        tag, end = read_varint(data, at)
        match tag & 7:
            case 0:
                _, end = read_varint(data, end)
            case 2:
                length, end = read_varint(data, end)
                end += length
            case kind:
                end += {1: 8, 5: 4, 3: 0, 4: 0}[kind]
        yield data[at:end]
        at = end


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] >= 0x80:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


class Ingress:
    """One for all examples: what one of them leaves behind, another would meet."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        parts = self._runner.run(self._stack.enter_async_context(answering_ingress()))
        self._channel, self._serving, self._engine = parts
        self.codes: set[str] = set()

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def fuzz(self, method: MethodDescriptor, draw: random.Random) -> None:
        """Send a message as it is, mutated, and broken; then one that is right."""
        message = Filler(draw).message(method.input_type)
        data = message.SerializeToString()
        for request in (message, mutated(method.input_type, data, draw), broken(data, draw)):
            error = self._runner.run(status_of(self._channel, method, request))
            assert error is None or error.code() not in BUGS, error.details()
            self.codes.add("OK" if error is None else error.code().name)
        hello = GetMessageClass(METHODS["Generate"].input_type)(text="hello")
        assert self._runner.run(status_of(self._channel, METHODS["Generate"], hello)) is None
        assert self._serving.num_requests_in_flight == 0
        assert self._engine.num_unfinished_requests == 0


@pytest.fixture
def ingress() -> Iterator[Ingress]:
    ingress = Ingress()
    yield ingress
    ingress.close()


@pytest.mark.parametrize("name", METHODS)
def test_no_message_is_more_than_its_clients_mistake(name: str, ingress: Ingress) -> None:
    settings(max_examples=12)(given(draw=DRAWS)(ingress.fuzz))(METHODS[name])
    assert ingress.codes


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", METHODS)
def test_no_message_of_very_many_is_more_than_its_clients_mistake(name: str, ingress: Ingress) -> None:
    settings(max_examples=1000)(given(draw=DRAWS)(ingress.fuzz))(METHODS[name])


def test_what_is_drawn_reaches_the_engines(ingress: Ingress) -> None:
    draw = random.Random(1)
    for _ in range(60):
        ingress.fuzz(METHODS["Generate"], draw)
    assert {"OK", "INVALID_ARGUMENT"} <= ingress.codes
