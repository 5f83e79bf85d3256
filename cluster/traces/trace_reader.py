"""Reads traces of requests from files, in any of the forms.

A file is read twice. The first time checks every line, and keeps 16 bytes for each one: its arrival and its offset. The
second time yields the requests in the order of arrival. So a mistake in the last line shows before anything has begun,
and a trace of 10^6 requests takes 16 MB, however long its prompts are.

Arrivals that were recorded in bins, such as Mooncake's conversations in bins of 3 s, would be bursts that never were.
They are spread within their bins, drawn from a seed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.traces.public_forms import AZURE_COLUMNS, ParseRow, azure_parser, parse_mooncake
from cluster.traces.request_trace import is_header, parse_header, parse_line
from cluster.traces.trace_lines import MAX_LINE_BYTES, bad_line, bad_trace, numbered_lines, open_trace_file
from cluster.traces.trace_request import TraceRequest

_BIN_S: Final = (1.0, 10.0)
"""The widths of bins that are found: round times that are further apart are bursts."""
_MIN_BINS: Final = 20
_MIN_PER_BIN: Final = 2.0
"""With fewer bins, or fewer requests in each of them, round times are no sign of bins."""

_TOLERANCE: Final = 0.01
_MIN_SHARE: Final = 0.95
"""The share of the gaps between bins that are about multiples of the bins' width: clocks drift a little."""

_ParsedT = TypeVar("_ParsedT")
_Times: TypeAlias = NDArray[np.float64]
_Make: TypeAlias = Callable[[str, int, float], TraceRequest]
"""Makes a request from the text of a line, the request's number from 0 on, and its arrival."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace whose lines have been checked.

    arrivals_s:     as recorded, ascending, from the first request, [num_requests]
    bin_s:          the width of the bins in which the arrivals were recorded; 0: they were not
    num_left_out:   lines of requests that were refused before their lengths were known
    """

    path: Path
    arrivals_s: _Times
    bin_s: float
    num_left_out: int
    _offsets: NDArray[np.int64]
    _make: _Make

    def __len__(self) -> int:
        """Return how many requests the trace has."""
        return len(self.arrivals_s)

    def requests(self, seed: int = 0, num_requests: int | None = None) -> Iterator[TraceRequest]:
        """Yield the requests in the order of arrival; the file is open meanwhile.

        seed:         draws the arrivals within bins
        num_requests: how many to yield; None: all
        Raises InvalidConfig if the file was changed since it was checked.
        """
        arrivals_s = spread(self.arrivals_s, self.bin_s, seed)
        with open_trace_file(self.path) as file:
            for index in range(len(self) if num_requests is None else min(num_requests, len(self))):
                file.seek(int(self._offsets[index]))
                try:
                    request = self._make(file.readline(MAX_LINE_BYTES).decode(), index, float(arrivals_s[index]))
                except ValueError as error:
                    raise bad_trace(self.path, f"it was changed while it was read: {error}") from error
                yield request


def open_trace(path: Path, bin_s: float | None = None) -> Trace:
    """Check a trace's file, and index it.

    bin_s: the width of the bins in which the arrivals were recorded; 0: they were not; None: find out from the arrivals
    Raises InvalidConfig, which names the line.
    """
    with open_trace_file(path) as file:
        lines = numbered_lines(path, file)
        first = next(lines, None)
        if first is None:
            raise bad_trace(path, "it has no requests")
        number, _, text = first
        if is_header(text):
            _parsed(path, number, text, parse_header)
            index = _index_own(path, lines)
        elif text.lstrip().startswith("{"):
            file.seek(0)
            index = _index_public(path, numbered_lines(path, file), parse_mooncake)
        elif (parse := _parsed(path, number, text, azure_parser)) is not None:
            index = _index_public(path, lines, parse)
        else:
            forms = f"neither a JSON object nor the header {','.join(AZURE_COLUMNS)}"
            raise bad_trace(path, f"line {number} is {forms}")
    if not index.times_s:
        raise bad_trace(path, "it has no requests")
    return _trace(path, index, bin_s)


def spread(arrivals_s: _Times, bin_s: float, seed: int) -> _Times:
    """Return arrivals drawn uniformly within their bins, ascending from 0, [n]; unchanged if bin_s is 0."""
    if not bin_s:
        return arrivals_s
    within_s = np.random.default_rng(seed).random(len(arrivals_s)) * bin_s
    drawn_s = np.sort(arrivals_s + within_s)
    spread_s: _Times = drawn_s - drawn_s[0]
    return spread_s


def find_bin_s(arrivals_s: _Times) -> float:
    """Return the width of the bins in which arrivals were recorded, in seconds; 0 if there is no sign of bins.

    The sign is that many requests came at few times, and nearly all of these are some multiple of one gap apart.
    arrivals_s: ascending, [n], n > 0
    """
    gaps_s = np.diff(np.unique(arrivals_s))
    if len(gaps_s) + 1 < _MIN_BINS or len(arrivals_s) < _MIN_PER_BIN * (len(gaps_s) + 1):
        return 0.0
    width_s = float(np.median(gaps_s))
    multiples = gaps_s / width_s
    share = np.mean(np.abs(multiples - np.maximum(np.round(multiples), 1.0)) <= _TOLERANCE)
    return width_s if share >= _MIN_SHARE and _BIN_S[0] <= width_s <= _BIN_S[1] else 0.0


@dataclass(slots=True)
class _Index:
    """The arrivals and offsets of a file's lines. make: makes the requests of these lines"""

    make: _Make
    has_bins: bool = True
    num_left_out: int = 0
    times_s: array[float] = field(default_factory=lambda: array("d"))
    offsets: array[int] = field(default_factory=lambda: array("q"))

    def add(self, time_s: float, offset: int) -> None:
        self.times_s.append(time_s)
        self.offsets.append(offset)


def _trace(path: Path, index: _Index, bin_s: float | None) -> Trace:
    times_s, offsets = np.array(index.times_s), np.array(index.offsets, np.int64)
    in_order = np.argsort(times_s, kind="stable")
    arrivals_s: _Times = times_s[in_order] - times_s[in_order[0]]
    if bin_s is None:
        bin_s = find_bin_s(arrivals_s) if index.has_bins else 0.0
    return Trace(path, arrivals_s, bin_s, index.num_left_out, offsets[in_order], index.make)


def _index_public(path: Path, lines: Iterator[tuple[int, int, str]], parse: ParseRow) -> _Index:
    index = _Index(_make_public(parse))
    for number, offset, text in lines:
        time_s = _parsed(path, number, text, parse).timestamp / 1000
        if index.times_s and time_s < index.times_s[-1]:
            raise bad_line(path, number, "its time is before that of the line above: sort the lines by time")
        index.add(time_s, offset)
    return index


def _make_public(parse: ParseRow) -> _Make:
    def make(text: str, index: int, arrival_s: float) -> TraceRequest:
        row = parse(text)
        num_output_tokens = max(1, row.output_length)
        return TraceRequest(str(index), arrival_s, row.input_length, num_output_tokens, row.hash_ids)

    return make


def _index_own(path: Path, lines: Iterator[tuple[int, int, str]]) -> _Index:
    index, request_numbers, line_numbers = _Index(_make_own, has_bins=False), array("q"), array("q")
    for number, offset, text in lines:
        if not text.endswith("\n"):
            raise bad_line(path, number, "the file ends in the middle of this line: remove the line")
        line = _parsed(path, number, text, parse_line)
        request_numbers.append(line.number)
        line_numbers.append(number)
        if line.num_prompt_tokens is None:
            index.num_left_out += 1
        else:
            index.add(line.arrival_s, offset)
    _refuse_repeated(path, np.array(request_numbers), np.array(line_numbers))
    return index


def _refuse_repeated(path: Path, request_numbers: NDArray[np.int64], line_numbers: NDArray[np.int64]) -> None:
    in_order = np.argsort(request_numbers, kind="stable")
    (repeated,) = np.nonzero(np.diff(request_numbers[in_order]) == 0)
    if len(repeated):
        earlier, later = line_numbers[in_order[repeated[0]]], line_numbers[in_order[repeated[0] + 1]]
        number = request_numbers[in_order[repeated[0]]]
        raise bad_line(path, int(later), f"request number {number} is in line {earlier} already: remove one of the two")


def _make_own(text: str, _: int, arrival_s: float) -> TraceRequest:
    line = parse_line(text)
    if line.num_prompt_tokens is None:
        raise ValueError("a line has lost its num_prompt_tokens")
    return TraceRequest(
        str(line.number),
        arrival_s,
        line.num_prompt_tokens,
        max(1, line.num_output_tokens),
        line.block_hashes,
        line.tenant,
        line.ttft_aim_s,
        line.itl_aim_s,
        line.num_cached_tokens,
    )


def _parsed(path: Path, number: int, text: str, parse: Callable[[str], _ParsedT]) -> _ParsedT:
    try:
        return parse(text)
    except ValueError as error:
        raise bad_line(path, number, str(error)) from error
