"""Tests the reading of files of measured operators, and the refusal of bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.errors import InvalidConfig
from cluster.simulation.timing.op_files import read_op_points


def _read(tmp_path: Path, text: str, *, has_layers: bool = True) -> dict[str, list[list[float]]]:
    file = tmp_path / "dense.csv"
    file.write_text(text)
    found = read_op_points(file, ["tokens"], {"ep": 1.0}, has_layers=has_layers)
    return {name: np.column_stack([points.keys, points.times_us]).tolist() for name, points in found.items()}


def test_points_are_sorted_by_their_keys_and_other_columns_are_ignored(tmp_path: Path) -> None:
    text = "note,layer,tokens,time_us\nx,a,4,2.5\n\ny,b,1,7\nz,a,2,1\n"
    assert _read(tmp_path, text) == {"a": [[2, 1, 1.0], [4, 1, 2.5]], "b": [[1, 1, 7.0]]}


def test_a_column_that_may_be_missing_is_read_where_it_is_there(tmp_path: Path) -> None:
    assert _read(tmp_path, "tokens,ep,time_us\n1,2,3\n", has_layers=False) == {"": [[1, 2, 3.0]]}


def test_a_point_that_was_measured_twice_has_the_mean_time(tmp_path: Path) -> None:
    assert _read(tmp_path, "layer,tokens,time_us\na,1,2\na,1,4\na,2,9\n") == {"a": [[1, 1, 3.0], [2, 1, 9.0]]}


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("layer,tokens\na,1\n", "line 1: there is no column time_us"),
        ("", "line 1: there is no column tokens, time_us, layer"),
        ("layer,tokens,time_us,tokens\n", "line 1: a column is there twice"),
        ("layer,tokens,time_us\n", "it has no points"),
        ("layer,tokens,time_us\na,1,2\na,2\n", "line 3 has 2 columns, and the header has 3"),
        ("layer,tokens,time_us\na,1,nan\n", "line 2, column time_us: 'nan' is no number from 0 to"),
        ("layer,tokens,time_us\na,1,inf\n", "line 2, column time_us: 'inf'"),
        ("layer,tokens,time_us\na,1,-2\n", "line 2, column time_us: '-2'"),
        ("layer,tokens,time_us\na,1,fast\n", "line 2, column time_us: 'fast'"),
        ("layer,tokens,time_us\na,1.5,2\n", "line 2, column tokens: '1.5' is no whole number"),
        ("layer,tokens,time_us\na,1e18,2\n", "line 2, column tokens: '1e18' is no number from 0 to"),
        ("layer,tokens,time_us\na," + "1" * 200_000 + ",2\n", "it cannot be read: field larger than field limit"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_column(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        _read(tmp_path, text)
    assert str(tmp_path / "dense.csv") in str(refused.value)
    assert mistake in str(refused.value)


def test_a_file_that_is_not_there_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"none\.csv: it cannot be read: No such file"):
        read_op_points(tmp_path / "none.csv", ["tokens"], has_layers=True)
    (tmp_path / "binary.csv").write_bytes(b"layer,tokens,time_us\n\xff\xfe,1,2\n")
    with pytest.raises(InvalidConfig, match=r"binary\.csv: it cannot be read"):
        read_op_points(tmp_path / "binary.csv", ["tokens"], has_layers=True)
