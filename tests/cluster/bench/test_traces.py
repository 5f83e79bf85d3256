from __future__ import annotations

from pathlib import Path

import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.traces import read_trace
from cluster.errors import InvalidConfig

MOONCAKE = """{"timestamp": 3000, "input_length": 700, "output_length": 500, "hash_ids": [0, 14]}
{"timestamp": 0, "input_length": 6, "output_length": 3}

{"timestamp": 4500, "input_length": 20, "output_length": 0}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncakes_lines_are_read_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    assert read_trace(_file(tmp_path, MOONCAKE)) == [
        PlannedRequest(0, 0.0, 6, 3),
        PlannedRequest(1, 3.0, 700, 500, (0, 14)),
        PlannedRequest(2, 4.5, 20, 1),
    ]


def test_azures_table_is_read(tmp_path: Path) -> None:
    plan = read_trace(_file(tmp_path, AZURE))
    assert [(one.num_input_tokens, one.num_output_tokens) for one in plan] == [(4808, 10), (3180, 8), (110, 27)]
    assert [one.arrival_s for one in plan] == pytest.approx([0.0, 0.052, 60.0])


def test_azures_later_table_has_the_time_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:01+00:00,7,8\n"
    )
    assert [one.arrival_s for one in read_trace(_file(tmp_path, text))] == pytest.approx([0.0, 0.99007])


def test_a_part_of_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    plan = read_trace(_file(tmp_path, AZURE), num_requests=2, speed=4.0)
    assert [one.arrival_s for one in plan] == pytest.approx([0.0, 0.013])


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "it has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "it has no requests"),
        ("time,in,out\n1,2,3\n", "line 1 is neither a JSON object nor the header"),
        ('{"timestamp": 0, "input_length": 3}', "line 1: Object missing required field `output_length`"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\nnonsense', "line 2: JSON is malformed"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: lengths must be at least 1"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids are too few for 513",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2", "line 2 is not a date with a time and two numbers"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1", "line 2 is not a date with a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,-2", "line 2: lengths must be"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(InvalidConfig, match=mistake):
        read_trace(_file(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="it is not UTF-8"):
        read_trace(tmp_path / "binary")
