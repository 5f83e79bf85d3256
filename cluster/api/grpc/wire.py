"""Counts the entries of a message in its bytes, before the message is decoded.

A message of 16 MiB has room for eight million empty entries. To decode them takes a third of a second, in which the
event loop serves no other stream, and a gigabyte that the process may keep. So the entries of a large message are
counted first, in slices. A message with few entries, however long it is, is decoded in some milliseconds.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cluster.errors import FieldViolation, InvalidRequest

MAX_UNCOUNTED_BYTES: Final = 65_536
"""The largest message that is decoded without being counted."""
MAX_ENTRIES: Final = 400_000
"""The most fields, with those of messages inside. Conversations of 50 000 messages have 150 000, with parts more."""
MAX_NUMBERS: Final = 4_200_000
"""The most numbers in packed fields, which take 20 ms to decode."""
_WITH_LENGTH: Final = 2
"""The wire type of texts, bytes, messages and packed numbers."""
_SLICE: Final = 4000
"""The entries that are counted before the event loop gets a turn, which takes a millisecond or two."""
_PACKED_KINDS: Final = frozenset(
    [
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_DOUBLE,
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_ENUM,
    ]
)
_Fields: TypeAlias = "Mapping[int, Descriptor | None]"
"""For each field number with entries inside: the type of the messages, or None for packed numbers."""


async def check_entries(descriptor: Descriptor, data: bytes) -> None:
    """Count the entries of a message of this type. Raises InvalidRequest if it has too many, or is malformed."""
    if len(data) <= MAX_UNCOUNTED_BYTES:
        return
    for _ in counted(descriptor, data):
        await asyncio.sleep(0)


def counted(descriptor: Descriptor, data: bytes) -> Iterator[None]:
    """Count in slices of a millisecond or two, and yield after each. Raises InvalidRequest as check_entries() does.

    The entries of unknown groups count as entries of the message around the group.
    """
    num_entries = num_numbers = 0
    around: list[tuple[_Fields, int, int]] = []
    fields, at, end = _fields_of(descriptor), 0, len(data)
    while at < end or around:
        if at >= end:
            fields, at, end = around.pop()
            continue
        num_entries += 1
        if num_entries > MAX_ENTRIES:
            raise _refusal(data, f"at most {MAX_ENTRIES} entries in all, numbers in packed fields apart")
        if num_entries % _SLICE == 0:
            yield
        tag, at = _varint(data, at, end)
        begin, at = _content(data, tag & 7, at, end)
        if tag & 7 == _WITH_LENGTH and begin < at and (number := tag >> 3) in fields:
            if (inside := fields[number]) is not None:
                around.append((fields, at, end))
                fields, at, end = _fields_of(inside), begin, at
            else:
                num_numbers += _num_numbers(data, begin, at - begin)
                if num_numbers > MAX_NUMBERS:
                    raise _refusal(data, f"at most {MAX_NUMBERS} numbers in all")


def _content(data: bytes, kind: int, at: int, end: int) -> tuple[int, int]:
    """Return where a field's content begins and ends, by its wire type. Raises InvalidRequest."""
    begin = at
    match kind:
        case 0:
            _, at = _varint(data, at, end)
        case 1:
            at += 8
        case 2:
            length, begin = _varint(data, at, end)
            at = begin + length
        case 3 | 4:
            pass
        case 5:
            at += 4
        case _:
            raise _not_a_message(data)
    if at > end:
        raise _not_a_message(data)
    return begin, at


def _num_numbers(data: bytes, begin: int, length: int) -> int:
    """Return how many numbers a packed field has at most: only the last byte of a number is below 0x80."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, length, begin) < 0x80))


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number; returns it, and the position after it. Raises InvalidRequest."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    number = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise _not_a_message(data)


@functools.cache
def _fields_of(descriptor: Descriptor) -> _Fields:
    fields: dict[int, Descriptor | None] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            fields[field.number] = field.message_type
        elif field.is_repeated and field.cpp_type in _PACKED_KINDS:
            fields[field.number] = None
    return fields


def _not_a_message(data: bytes) -> InvalidRequest:
    return _refusal(data, "a message of the method's type")


def _refusal(data: bytes, allowed: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("request", f"{len(data)} bytes", allowed))
