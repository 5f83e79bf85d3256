"""From the bytes of a body to what it asks for. Large ones are read in steps, of which none keeps the event loop."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec
from pydantic import ValidationError

from cluster.api.http.errors import malformed
from cluster.api.http.receiving.entries import SLICE_BYTES, count_entries
from cluster.api.http.requests import Body
from cluster.errors import FieldViolation, InvalidRequest

BodyT = TypeVar("BodyT", bound=Body)

_MAX_BYTES_AT_ONCE: Final = SLICE_BYTES


def is_large(num_bytes: int) -> bool:
    """Whether a body of so many bytes is read in steps."""
    return num_bytes > _MAX_BYTES_AT_ONCE


async def read_body(kind: type[BodyT], data: bytes) -> BodyT:
    """What a body asks for. Raises InvalidRequest.

    No step takes longer than what MAX_ENTRIES numbers take to parse, some 20 ms. After each step of a large body others
    have their turn.
    """
    if not is_large(len(data)):
        return _validated(kind, _parsed(data))
    for counts in count_entries(data):
        if (excess := counts.excess()) is not None:
            raise InvalidRequest(FieldViolation("body", *excess))
        await asyncio.sleep(0)
    value = _parsed(data)
    await asyncio.sleep(0)
    body = _validated(kind, value)
    await asyncio.sleep(0)
    return body


def _parsed(data: bytes) -> object:
    try:
        value: object = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(FieldViolation("body", "no JSON", str(error))) from error
    return value


def _validated(kind: type[BodyT], value: object) -> BodyT:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise malformed(error) from error
