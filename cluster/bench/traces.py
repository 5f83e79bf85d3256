"""Reads traces of real arrivals and lengths.

- Mooncake's form, a JSON object in each line: `timestamp` in milliseconds, `input_length`, `output_length`, and maybe
  `hash_ids`, the ids of the prompt's blocks of 512 tokens. Requests that share ids share these tokens.
- Azure's form, CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`; TIMESTAMP is a date and a time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Final

import msgspec

from cluster.bench.arrivals import PlannedRequest
from cluster.errors import InvalidConfig

BLOCK_TOKENS: Final = 512
"""The number of tokens that an id in `hash_ids` stands for."""
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Row(msgspec.Struct):
    """A line of a trace. timestamp: milliseconds"""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, num_requests: int | None = None, speed: float = 1.0) -> list[PlannedRequest]:
    """Read the first requests of a trace, in the order of their arrival; the first one arrives at 0.

    num_requests: how many to read; None: all
    speed:        replay the trace this many times as fast as it was recorded
    Requests without output get one token, since a server makes at least one.
    Raises InvalidConfig, which names the line, if the file cannot be read or is neither of the two forms.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(islice(_rows(path, lines), num_requests))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _bad(path, f"it cannot be read: {reason}") from error
    if not rows:
        raise _bad(path, "it has no requests")
    rows.sort(key=lambda row: row.timestamp)
    begin = rows[0].timestamp
    return [
        PlannedRequest(
            index, (row.timestamp - begin) / 1000 / speed, row.input_length, max(1, row.output_length), row.hash_ids
        )
        for index, row in enumerate(rows)
    ]


def _rows(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    numbered = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    filled = ((number, line) for number, line in numbered if line)
    first_number, first = next(filled, (0, ""))
    if first.startswith("{"):
        for number, line in chain([(first_number, first)], filled):
            yield _checked(path, number, _json_row(path, number, line))
    elif first:
        columns = next(csv.reader([first.removeprefix("\ufeff")]))
        if not set(_AZURE_COLUMNS) <= set(columns):
            allowed = f"neither a JSON object nor the header {','.join(_AZURE_COLUMNS)}"
            raise _bad(path, f"line {first_number} is {allowed}")
        for number, line in filled:
            yield _checked(path, number, _csv_row(path, number, columns, line))


def _json_row(path: Path, number: int, line: str) -> _Row:
    try:
        return msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise _bad(path, f"line {number}: {error}") from error


def _csv_row(path: Path, number: int, columns: list[str], line: str) -> _Row:
    values = dict(zip(columns, next(csv.reader([line])), strict=False))
    try:
        time_text, *lengths = (values[column] for column in _AZURE_COLUMNS)
        # Azure writes seven digits of a second; Python reads six.
        whole, _, fraction = time_text.partition(".")
        digits = "".join(char for char in fraction[:6] if char.isdigit()) or "0"
        moment = datetime.fromisoformat(whole)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        timestamp_ms = moment.timestamp() * 1000 + int(digits.ljust(6, "0")) / 1000
        num_input_tokens, num_output_tokens = map(int, lengths)
        return _Row(timestamp_ms, num_input_tokens, num_output_tokens)
    except (KeyError, ValueError) as error:
        raise _bad(path, f"line {number} is not a date with a time and two numbers of tokens: {line[:80]}") from error


def _checked(path: Path, number: int, row: _Row) -> _Row:
    if row.input_length < 1 or row.output_length < 0 or not math.isfinite(row.timestamp):
        raise _bad(path, f"line {number}: lengths must be at least 1 (input) and 0 (output), the time finite")
    if row.hash_ids and len(row.hash_ids) * BLOCK_TOKENS < row.input_length:
        shown = f"{len(row.hash_ids)} hash_ids are too few for {row.input_length} tokens"
        raise _bad(path, f"line {number}: {shown}: each stands for {BLOCK_TOKENS}")
    return row


def _bad(path: Path, mistake: str) -> InvalidConfig:
    return InvalidConfig(f"--trace {path}", [mistake])
