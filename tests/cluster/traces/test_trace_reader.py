"""Traces of every form are read, and a mistake in any line is named with its file and line.

Tests of cluster/traces/trace_reader.py, cluster/traces/trace_lines.py, cluster/traces/trace_request.py and
cluster/traces/public_forms.py.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidConfig
from cluster.traces.trace_lines import MAX_LINE_BYTES
from cluster.traces.trace_reader import Trace, find_bin_s, open_trace, spread
from cluster.traces.trace_request import MAX_TRACE_TOKENS, TraceRequest
from tests.cluster.traces.trace_samples import AZURE, HEADER, MOONCAKE, line, own_form, trace_file

_CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _row(**changed: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 3, "output_length": 1} | changed) + "\n"


def test_mooncakes_lines_are_read(tmp_path: Path) -> None:
    assert list(open_trace(trace_file(tmp_path, MOONCAKE)).requests()) == [
        TraceRequest("0", 0.0, 6, 3),
        TraceRequest("1", 3.0, 700, 500, (0, 14)),
        TraceRequest("2", 4.5, 20, 1),
    ]


def test_azures_table_is_read(tmp_path: Path) -> None:
    found = list(open_trace(trace_file(tmp_path, AZURE)).requests())
    assert [(one.num_input_tokens, one.num_output_tokens) for one in found] == [(4808, 10), (3180, 8), (110, 27)]
    assert [one.arrival_s for one in found] == pytest.approx([0.0, 0.052, 60.0])


def test_azures_later_table_has_the_time_zone_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = f"\ufeff{_CSV}2024-05-10 00:00:00.009930+00:00,5,6\r\n2024-05-10 00:00:01+00:00,7,8\r\n"
    found = open_trace(trace_file(tmp_path, text)).requests()
    assert [one.arrival_s for one in found] == pytest.approx([0.0, 0.99007])


def test_raypds_own_lines_come_in_the_order_of_arrival_and_refused_ones_are_counted(tmp_path: Path) -> None:
    lines = [
        line(1, 9.0, block_hashes=(7, 8), tenant="a"),
        line(2, 5.0, num_output_tokens=0, num_cached_tokens=96, ttft_aim_s=0.5, itl_aim_s=0.05),
        line(3, 6.0, num_prompt_tokens=None, outcome="overloaded"),
    ]
    trace = open_trace(trace_file(tmp_path, own_form(lines)))
    assert (len(trace), trace.num_left_out, trace.bin_s) == (2, 1, 0.0)
    assert list(trace.requests()) == [
        TraceRequest("2", 0.0, 600, 1, ttft_s=0.5, itl_s=0.05, num_cached_tokens=96),
        TraceRequest("1", 4.0, 600, 5, (7, 8), "a"),
    ]


def test_the_first_requests_of_a_trace_can_be_read_alone(tmp_path: Path) -> None:
    trace = open_trace(trace_file(tmp_path, MOONCAKE))
    assert [one.request_id for one in trace.requests(num_requests=2)] == ["0", "1"]
    assert len(list(trace.requests(num_requests=9))) == 3


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "it has no requests"),
        ("\n \n", "it has no requests"),
        (_CSV, "it has no requests"),
        ("time,in,out\n1,2,3\n", "line 1 is neither a JSON object nor the header"),
        (_row()[:40] + "}", "line 1: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 3}', "line 1: Object missing required field `output_length`"),
        (_row() + "nonsense", "line 2: JSON is malformed"),
        (_row() + _row()[:20], "line 2: Input data was truncated"),
        (_row(input_length=0), "line 1: Expected `int` >= 1 - at `$.input_length`"),
        (_row(output_length=-1), "line 1: Expected `int` >= 0 - at `$.output_length`"),
        (_row(input_length=10**9), f"line 1: Expected `int` <= {MAX_TRACE_TOKENS}"),
        (_row(output_length=10**30), "line 1: "),
        (_row(input_length="3"), "line 1: Expected `int`, got `str`"),
        (_row(input_length=True), "line 1: Expected `int`, got `bool`"),
        (_row(input_length=3.5), "line 1: Expected `int`, got `float`"),
        (_row(timestamp=float("nan")), "line 1: JSON is malformed"),
        (_row(timestamp=-1), "line 1: Expected `float` >= 0.0"),
        (_row(timestamp=1e300), "line 1: Expected `float` <= "),
        ('{"timestamp": 1e999, "input_length": 3, "output_length": 1}', "line 1: "),
        (_row(timestamp=5) + "\n" + _row(timestamp=4), "line 3: its time is before that of the line above"),
        (_row(input_length=513, hash_ids=[1]), "line 1: 1 hash_ids are too few for 513 tokens"),
        (_row(input_length=512, hash_ids=[1, 2]), "line 1: 2 hash_ids are too many for 512 tokens"),
        (_row(hash_ids=[-1]), "line 1: Expected `int` >= 0"),
        (f"{_CSV}yesterday,1,2", "line 2: it is not a date with a time and two numbers"),
        (f"{_CSV}2023-11-16 18:17:03,1", "line 2: it is not a date with a time"),
        (f"{_CSV}2023-11-16 18:17:03,1,nan", "line 2: it is not a date with a time"),
        (f"{_CSV}2023-11-16 18:17:03,1_0,2", "line 2: it is not a date with a time"),
        (f"{_CSV}2023-11-16 18:17:03,1,-2", "line 2: Expected `int` >= 0"),
        (f"{_CSV}2023-11-16 18:17:03,1000000000,2", f"line 2: Expected `int` <= {MAX_TRACE_TOKENS}"),
        (f"{_CSV}2023-11-16 18:17:03,1,2\n2023-11-16 18:17:02,1,2", "line 3: its time is before"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, mistake: str) -> None:
    path = trace_file(tmp_path, text)
    with pytest.raises(InvalidConfig) as caught:
        open_trace(path)
    assert str(caught.value).startswith(f"--trace {path}: {mistake}")


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (own_form([]), "it has no requests"),
        (own_form([line(1, 0.0), line(2, 1.0)])[:-1], "line 3: the file ends in the middle of this line"),
        (own_form([line(1, 0.0), line(2, 1.0), line(1, 2.0)]), "line 4: request number 1 is in line 2 already"),
        (own_form([line(1, -1.0)]), "line 2: Expected `float` >= 0.0"),
        (own_form([line(1, 0.0, block_hashes=(1,))]), "line 2: 1 block_hashes are too few for 600 tokens"),
        (own_form([line(1, 0.0, num_prompt_tokens=10**9)]), "line 2: Expected `int` <= "),
        (own_form([line(1, 0.0)]).replace(b'trace":1', b'trace":2', 1), "line 1: it is of version 2 of the form"),
        (own_form([line(1, 0.0)]).replace(b'trace":1', b'trace":"x"', 1), "line 1: it is of version 'x' of the form"),
        (own_form([line(1, 0.0)]).replace(b"512", b"16", 1), "line 1: its blocks have 16 tokens; allowed: 512"),
        (own_form([line(1, 0.0)]) + own_form([line(2, 0.0)]), "line 3: it is the first line of another file"),
        (b"\xff\xfe\x00", "line 1: it is not UTF-8"),
        (MOONCAKE.encode() + b'{"timestamp": 9000, "\xff": 0}', "line 5: it is not UTF-8"),
        (b" " * (MAX_LINE_BYTES + 1), f"line 1: it is longer than {MAX_LINE_BYTES} bytes"),
    ],
)
def test_a_mistake_in_bytes_or_in_raypds_own_form_is_named(tmp_path: Path, content: bytes, mistake: str) -> None:
    path = trace_file(tmp_path, content)
    with pytest.raises(InvalidConfig) as caught:
        open_trace(path)
    assert str(caught.value).startswith(f"--trace {path}: {mistake}")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        open_trace(tmp_path / "missing")
    with pytest.raises(InvalidConfig, match="cannot be read: Is a directory"):
        open_trace(tmp_path)
    with pytest.raises(InvalidConfig, match="not a regular file"):
        open_trace(Path("/dev/zero"))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    trace = open_trace(trace_file(tmp_path, MOONCAKE))
    trace_file(tmp_path, MOONCAKE[:70])
    with pytest.raises(InvalidConfig, match="it was changed while it was read"):
        list(trace.requests())


def test_arrivals_in_bins_are_spread_within_their_bins_by_the_seed(tmp_path: Path) -> None:
    # the clock of Mooncake's conversations drifts by a few milliseconds
    stamps = sorted(3000 * bin_ - bin_ % 2 for bin_ in [index // 4 for index in range(160)])
    trace = open_trace(trace_file(tmp_path, "".join(_row(timestamp=stamp) for stamp in stamps)))
    assert trace.bin_s == pytest.approx(3.0, abs=0.01)
    arrivals_s = [one.arrival_s for one in trace.requests(seed=5)]
    assert arrivals_s == [one.arrival_s for one in trace.requests(seed=5)]
    assert arrivals_s != [one.arrival_s for one in trace.requests(seed=6)]
    assert arrivals_s == sorted(arrivals_s)
    assert len(set(arrivals_s)) == 160
    # the first one is at 0, wherever it was drawn in its bin
    begins_s = np.array(stamps) / 1000
    assert np.all(np.abs(np.array(arrivals_s) - begins_s) < 3.01)
    assert open_trace(trace.path, bin_s=0.0).requests(5).__next__().arrival_s == 0.0
    assert [one.arrival_s for one in open_trace(trace.path, bin_s=0.0).requests(5)] == pytest.approx(begins_s)


@pytest.mark.parametrize(
    "arrivals_s",
    [
        [0.0] * 1000,
        [float(index) for index in range(1000)],
        [60.0 * (index // 50) for index in range(1000)],
        [3.0 * (index // 4) for index in range(76)],
        np.cumsum(np.random.default_rng(1).exponential(0.5, 1000)).round(3).tolist(),
    ],
    ids=["one burst", "one a second", "a burst a minute", "few bins", "Poisson"],
)
def test_round_times_alone_are_no_bins(arrivals_s: list[float]) -> None:
    assert find_bin_s(np.array(arrivals_s)) == 0.0


def test_drawn_arrivals_fill_their_bins_evenly() -> None:
    drawn_s = spread(np.repeat(np.arange(0.0, 3000.0, 3.0), 10), 3.0, seed=1)
    share = np.histogram(drawn_s % 3.0, bins=3, range=(0.0, 3.0))[0] / len(drawn_s)
    assert share == pytest.approx([1 / 3] * 3, abs=0.02)


def test_the_memory_of_an_indexed_trace_does_not_grow_with_its_prompts(tmp_path: Path) -> None:
    row = _row(input_length=512 * 1000, hash_ids=list(range(10**6, 10**6 + 1000)))
    path = trace_file(tmp_path, row * 500)
    tracemalloc.start()
    try:
        num_blocks = sum(len(one.blocks) for one in open_trace(path).requests())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_blocks == 500_000
    assert path.stat().st_size > 3 << 20
    assert peak_bytes < 1 << 20


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-5, 2**70), max_size=4),
)
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids", "raypd_request_trace", "number", "arrival_s")
_JUNK = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=5).map(lambda row: json.dumps(row).encode()),
    st.tuples(st.text("0123456789-: .T+", max_size=25), _VALUES, _VALUES).map(lambda cells: f"{cells}".encode()),
)


def _opened(path: Path) -> Trace | InvalidConfig:
    try:
        return open_trace(path)
    except InvalidConfig as error:
        return error


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([b"", MOONCAKE.encode(), AZURE.encode() + b"\n", _CSV.encode(), own_form([line(1, 0.0)])]),
    st.lists(_JUNK, max_size=4),
    st.integers(0, 400),
)
def test_any_file_is_read_or_refused_and_what_is_read_is_within_bounds(
    tmp_path: Path, begin: bytes, junk: list[bytes], cut: int
) -> None:
    whole = begin + b"\n".join(junk)
    path = trace_file(tmp_path, whole[: len(whole) - cut] if cut < len(whole) else whole)
    trace = _opened(path)
    if isinstance(trace, InvalidConfig):
        assert str(trace).startswith(f"--trace {path}: ")
        return
    found = list(trace.requests(seed=1))
    assert len(found) == len(trace) > 0
    arrivals_s = [one.arrival_s for one in found]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[0] == 0.0
    assert all(1 <= one.num_input_tokens <= MAX_TRACE_TOKENS for one in found)
    assert all(1 <= one.num_output_tokens <= MAX_TRACE_TOKENS for one in found)
    assert len({one.request_id for one in found}) == len(found)


def test_the_header_is_the_first_line_only() -> None:
    assert own_form([], HEADER).count(b"raypd_request_trace") == 1
