"""Parses and validates bodies. Large ones are read in steps, between which the event loop runs."""

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
    """Whether a body with this number of bytes is read in steps."""
    return num_bytes > _MAX_BYTES_AT_ONCE


async def read_body(kind: type[BodyT], data: bytes) -> BodyT:
    """Parse and validate a body. Raises InvalidRequest.

    No step takes longer than MAX_ENTRIES numbers take to parse, some 20 ms. The event loop runs after each step of a
    large body.
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
