"""The forms of public traces.

- Mooncake's form, a JSON object in each line: `timestamp` in milliseconds, `input_length`, `output_length`, and maybe
  `hash_ids`, the ids of the prompt's blocks of 512 tokens. Requests that share ids share these tokens.
- Azure's form, CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`; TIMESTAMP is a date and a time.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, TypeAlias

import msgspec

from cluster.traces.trace_lines import shown
from cluster.traces.trace_request import BlockId, InputTokens, OutputTokens, check_blocks

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LENGTHS: Final = ("input_length", "output_length")
_MAX_TIME_MS: Final = 1e14
"""About three thousand years: times in units smaller than milliseconds are refused."""


class PublicRow(msgspec.Struct, frozen=True, gc=False):
    """A line of a public trace. timestamp: milliseconds"""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_MAX_TIME_MS)]
    input_length: InputTokens
    output_length: OutputTokens
    hash_ids: tuple[BlockId, ...] = ()


ParseRow: TypeAlias = Callable[[str], PublicRow]
"""Parses the text of a line. Raises ValueError, which says what is wrong."""

_MOONCAKE: Final = msgspec.json.Decoder(PublicRow)


def parse_mooncake(text: str) -> PublicRow:
    """Parse a line of Mooncake's form. Raises ValueError."""
    row = _MOONCAKE.decode(text)
    if row.hash_ids:
        check_blocks(row.hash_ids, row.input_length, "hash_ids")
    return row


def azure_parser(header: str) -> ParseRow | None:
    """Return what parses the lines below this header; None if it is not the header of Azure's form."""
    columns = _cells(header.removeprefix("\ufeff"))
    if not set(AZURE_COLUMNS) <= set(columns):
        return None
    indices = [columns.index(name) for name in AZURE_COLUMNS]
    return lambda text: _parse_azure(text, indices)


def _parse_azure(text: str, indices: Sequence[int]) -> PublicRow:
    try:
        cells = _cells(text)
        time_text, *lengths = (cells[index] for index in indices)
        values = {"timestamp": _milliseconds(time_text), **dict(zip(_LENGTHS, map(_count, lengths), strict=True))}
    except (IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"it is not a date with a time and two numbers of tokens: {shown(text)}") from error
    return msgspec.convert(values, PublicRow)


def _count(cell: str) -> int:
    """Parse a number of tokens; int() alone would take "1_000" as well."""
    if not cell.strip().lstrip("+-").isdecimal():
        raise ValueError(cell)
    return int(cell)


def _milliseconds(text: str) -> float:
    """Return the Unix time of a date and a time, in milliseconds."""
    # Azure writes seven digits of a second; Python reads six.
    whole, _, fraction = text.partition(".")
    digits = "".join(char for char in fraction[:6] if char.isascii() and char.isdigit()) or "0"
    moment = datetime.fromisoformat(whole)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() * 1000 + int(digits.ljust(6, "0")) / 1000


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise ValueError(str(error)) from error
