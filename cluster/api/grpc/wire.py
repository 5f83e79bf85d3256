"""Decodes a large message in slices, between which the event loop runs, and counts its entries meanwhile.

A message of 16 MiB has room for eight million empty entries. To decode them takes a third of a second, in which the
event loop serves no other stream, and a gigabyte that the process may keep. So a message with too many entries is
refused before more of them are decoded. Four million tokens are allowed, but to decode them at once takes 30 to 50 ms.

A message may be cut wherever an entry of it ends: decoding the parts one after the other gives the same message. A
large message inside is decoded in the same way, and many numbers in one field are decoded as several fields with fewer
numbers each. All other entries stay whole: the decoder only copies a text, however long it is.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from cluster.errors import FieldViolation, InvalidRequest

MAX_UNCOUNTED_BYTES: Final = 65_536
"""The largest message that is decoded at once, without being counted."""
MAX_ENTRIES: Final = 400_000
"""The most fields, with those of messages inside. Conversations of 50 000 messages have 150 000, with parts more."""
MAX_NUMBERS: Final = 4_200_000
"""The most numbers in packed fields."""
_WITH_LENGTH: Final = 2
"""The wire type of texts, bytes, messages and packed numbers."""
_GROUP_BEGINS: Final = 3
_GROUP_ENDS: Final = 4
_SLICE_ENTRIES: Final = 4000
"""The entries that are counted before the event loop gets a turn, which takes a millisecond or two."""
_SLICE_BYTES: Final = 65_536
"""The bytes that are decoded before the event loop gets a turn; an entry that is longer is cut, if it can be."""
_VARINT_KINDS: Final = frozenset(
    [
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
    ]
)
_MAX_VARINT_BYTES: Final = 10


async def decode_in_slices(descriptor: Descriptor, data: bytes) -> Message:
    """Decode a message of this type. Raises InvalidRequest if it has too many entries, or is malformed."""
    message: Message = GetMessageClass(descriptor)()
    for _ in _Decoding(message, data).slices():
        await asyncio.sleep(0)
    return message


@dataclass(frozen=True, slots=True)
class _Field:
    """A field with entries inside.

    inside:     the type of the messages, or None for packed numbers
    can_be_cut: whether its content may be decoded in parts
    """

    name: str
    inside: Descriptor | None
    is_repeated: bool
    can_be_cut: bool


@dataclass(slots=True)
class _Level:
    """A message whose entries are read, or were read up to a message inside.

    end:     the position of its end
    message: gets the entries; None for a message that is decoded together with the entries around it
    begin:   the position of the first entry that is not decoded yet
    num_groups: the number of groups that are open, one inside the other. No field of this message is in a group.
    """

    fields: Mapping[int, _Field]
    end: int
    message: Message | None
    begin: int
    num_groups: int = 0

    @property
    def can_be_cut(self) -> bool:
        return self.message is not None and not self.num_groups


class _Decoding:
    """Decodes one message."""

    def __init__(self, message: Message, data: bytes) -> None:
        self._data = data
        self._levels = [_Level(_fields_of(message.DESCRIPTOR), len(data), message, 0)]
        self._num_numbers = 0

    def slices(self) -> Iterator[None]:
        """Decode in slices of a few milliseconds, and yield after each. Raises InvalidRequest.

        The entries of unknown groups count as entries of the message around the group.
        """
        data, levels, at, num_entries = self._data, self._levels, 0, 0
        while levels:
            level = levels[-1]
            if at - level.begin >= _SLICE_BYTES and level.can_be_cut:
                self._decode_up_to(at)
                yield
            if at >= level.end:
                self._decode_up_to(at)
                levels.pop()
                continue
            num_entries += 1
            if num_entries > MAX_ENTRIES:
                raise _refusal(data, f"at most {MAX_ENTRIES} entries in all, numbers in packed fields apart")
            if num_entries % _SLICE_ENTRIES == 0:
                yield
            entry, (tag, at) = at, _varint(data, at, level.end)
            begin, at = _content(data, tag & 7, at, level.end)
            level.num_groups += (tag & 7 == _GROUP_BEGINS) - (tag & 7 == _GROUP_ENDS)
            if tag & 7 != _WITH_LENGTH or begin == at or level.num_groups:
                continue
            if (field := level.fields.get(tag >> 3)) is None:
                continue
            if field.inside is None:
                self._count_numbers(begin, at)
            is_cut = at - begin > _SLICE_BYTES and field.can_be_cut and level.can_be_cut
            if is_cut:
                self._decode_up_to(entry)
                level.begin = at
            if field.inside is not None:
                inside = self._open(level, field) if is_cut else None
                levels.append(_Level(_fields_of(field.inside), at, inside, begin))
                at = begin
            elif is_cut:
                yield from self._decode_numbers(tag, begin, at)

    def _decode_up_to(self, end: int) -> None:
        """Decode the entries of the innermost message that are before this position, if they were not yet."""
        level = self._levels[-1]
        if level.message is not None and level.begin < end:
            self._decode(level.message, self._data[level.begin : end])
            level.begin = end

    def _decode_numbers(self, tag: int, begin: int, end: int) -> Iterator[None]:
        """Decode the numbers between two positions in slices, each as a field of its own."""
        message = self._levels[-1].message
        assert message is not None, "only the numbers of a message that can be cut are decoded apart"
        while begin < end:
            cut = self._end_of_number(begin, min(begin + _SLICE_BYTES, end))
            self._decode(message, _encoded(tag) + _encoded(cut - begin) + self._data[begin:cut])
            begin = cut
            yield

    def _end_of_number(self, begin: int, position: int) -> int:
        """Return the last position, up to this one, at which a number ends: only its last byte is below 0x80."""
        for cut in range(position, max(begin, position - _MAX_VARINT_BYTES), -1):
            if self._data[cut - 1] < 0x80:
                return cut
        raise _not_a_message(self._data)

    def _count_numbers(self, begin: int, end: int) -> None:
        """Add how many numbers a packed field has at most."""
        numbers = np.frombuffer(self._data, np.uint8, end - begin, begin)
        self._num_numbers += int(np.count_nonzero(numbers < 0x80))
        if self._num_numbers > MAX_NUMBERS:
            raise _refusal(self._data, f"at most {MAX_NUMBERS} numbers in all")

    def _open(self, level: _Level, field: _Field) -> Message:
        """Return the message inside a message that the next entries are of."""
        inside = getattr(level.message, field.name)
        message: Message = inside.add() if field.is_repeated else inside
        message.SetInParent()
        return message

    def _decode(self, message: Message, data: bytes) -> None:
        try:
            message.MergeFromString(data)
        except DecodeError as error:
            raise refusal_of_undecodable(len(self._data), error) from error


def refusal_of_undecodable(num_bytes: int, error: DecodeError) -> InvalidRequest:
    """Return the refusal of a message of this length that is not of its method's type."""
    allowed = f"a message of the method's type, UTF-8 ({error})"
    return InvalidRequest(FieldViolation("request", f"{num_bytes} bytes", allowed))


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


def _encoded(number: int) -> bytes:
    """Write a number as _varint() reads it."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@functools.cache
def _fields_of(descriptor: Descriptor) -> Mapping[int, _Field]:
    """Return the fields with entries inside, by their numbers."""
    fields: dict[int, _Field] = {}
    for field in descriptor.fields:
        inside = field.message_type
        if inside is not None:
            # An entry of a map is no message that anything could be added to.
            can_be_cut = not inside.GetOptions().map_entry
            fields[field.number] = _Field(field.name, inside, field.is_repeated, can_be_cut)
        elif field.is_repeated and field.cpp_type not in (
            FieldDescriptor.CPPTYPE_STRING,
            FieldDescriptor.CPPTYPE_MESSAGE,
        ):
            # Numbers of a fixed width are copied, which takes no time.
            fields[field.number] = _Field(field.name, None, is_repeated=True, can_be_cut=field.type in _VARINT_KINDS)
    return fields


def _not_a_message(data: bytes) -> InvalidRequest:
    return _refusal(data, "a message of the method's type")


def _refusal(data: bytes, allowed: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("request", f"{len(data)} bytes", allowed))
