"""Messages as they travel, written by hand: as objects of Python's they would take gigabytes."""

from __future__ import annotations

from google.protobuf.message import Message


def empties(message: type[Message], field: str, count: int) -> bytes:
    """Write so many empty entries of a field: two or three bytes each."""
    return inside(message, field, b"") * count


def inside(message: type[Message], field: str, content: bytes) -> bytes:
    """Write a message with this one entry of a field."""
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])
