"""Reads files of measured operators: CSV, a point in each line, in microseconds.

The form is that of LLMServingSim's profiles (github.com/casys-kaist/LLMServingSim, profiler/README.md). Columns that
nobody asks for are ignored. A point that is there several times counts with the mean of its times.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats
from cluster.errors import InvalidConfig

TIME_COLUMN: Final = "time_us"
LAYER_COLUMN: Final = "layer"
_MAX_BYTES: Final = 1 << 28
_MAX_KEY: Final = 1 << 40
_MAX_US: Final = 1e9


@dataclass(frozen=True, slots=True)
class OpPoints:
    """The measured points of one operator, each once, in the order of their keys.

    keys:     [n, num_keys], what the operator was measured with
    times_us: [n]
    """

    keys: Floats
    times_us: Floats


def read_op_points(
    path: Path, keys: Sequence[str], optional: Mapping[str, float] | None = None, *, has_layers: bool
) -> dict[str, OpPoints]:
    """Read a file's points by the name of the operator; without names all are the operator "".

    keys:       columns of whole numbers that are not negative
    optional:   further such columns, with the value that holds in files without the column
    has_layers: whether a column names the operator
    Raises InvalidConfig, which names the file, the line and the column.
    """
    optional = optional or {}
    found: defaultdict[str, tuple[list[list[float]], list[float]]] = defaultdict(lambda: ([], []))
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise bad_file(path, f"it is longer than {_MAX_BYTES} bytes")
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines)
            header = [name.strip() for name in next(rows, [])]
            _check_header(path, header, [*keys, TIME_COLUMN, *([LAYER_COLUMN] if has_layers else [])])
            index_of = {name: index for index, name in enumerate(header)}
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise bad_file(
                        path, f"line {rows.line_num} has {len(row)} columns, and the header has {len(header)}"
                    )
                line = _Line(path, rows.line_num, row, index_of)
                all_keys, times_us = found[line.text(LAYER_COLUMN) if has_layers else ""]
                all_keys.append(
                    [line.count(name) for name in keys]
                    + [line.count(name) if name in index_of else value for name, value in optional.items()]
                )
                times_us.append(line.number(TIME_COLUMN, _MAX_US))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise bad_file(path, f"it cannot be read: {reason}") from error
    if not found:
        raise bad_file(path, "it has no points")
    return {layer: _merged(*points) for layer, points in found.items()}


def bad_file(path: Path, mistake: str) -> InvalidConfig:
    """Return the error for a mistake in a file."""
    return InvalidConfig(str(path), [mistake])


@dataclass(frozen=True, slots=True)
class _Line:
    path: Path
    line_number: int
    row: list[str]
    index_of: Mapping[str, int]

    def text(self, column: str) -> str:
        return self.row[self.index_of[column]].strip()

    def number(self, column: str, most: float) -> float:
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:  # NaN is neither.
            where = f"line {self.line_number}, column {column}"
            raise bad_file(self.path, f"{where}: {text[:40]!r} is no number from 0 to {most:g}")
        return value

    def count(self, column: str) -> float:
        value = self.number(column, _MAX_KEY)
        if not value.is_integer():
            where = f"line {self.line_number}, column {column}"
            raise bad_file(self.path, f"{where}: {self.text(column)[:40]!r} is no whole number")
        return value


def _check_header(path: Path, header: list[str], needed: list[str]) -> None:
    missing = [name for name in needed if name not in header]
    if missing:
        raise bad_file(path, f"line 1: there is no column {', '.join(missing)}; it has {', '.join(header) or 'none'}")
    if len(set(header)) < len(header):
        raise bad_file(path, "line 1: a column is there twice")


def _merged(keys: list[list[float]], times_us: list[float]) -> OpPoints:
    distinct, index_of = np.unique(np.array(keys, dtype=np.float64), axis=0, return_inverse=True)
    index_of = index_of.reshape(-1)
    sums = np.bincount(index_of, weights=np.array(times_us, dtype=np.float64))
    return OpPoints(distinct, sums / np.bincount(index_of))
