"""The measurement of starts, of a program that behaves like `raypd serve`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.start_to_ready import Start, measure, table_of, usage_of

_SERVE = """#!/bin/sh
echo "  decode-0: starting"
sleep 600 & child=$!
trap 'kill $child; exit 0' TERM
echo "{last}"
wait
"""


def _checkout(directory: Path, last: str, then: str = "") -> Path:
    program = directory / ".venv/bin/raypd"
    program.parent.mkdir(parents=True)
    program.write_text(_SERVE.format(last=last).replace("wait\n", then or "wait\n"))
    program.chmod(0o755)
    return directory


def test_a_start_has_its_phases_and_the_memory_of_all_processes(tmp_path: Path) -> None:
    start = measure(_checkout(tmp_path, "ready model 'demo'"), [], wait_s=0.0)
    assert [line for _, line in start.phases] == ["decode-0: starting", "ready model 'demo'"]
    assert start.seconds == start.phases[-1][0] >= start.phases[0][0] > 0
    assert start.num_processes == 2
    assert start.pss_bytes > 0


def test_each_checkout_runs_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/another/checkout")
    checkout = _checkout(tmp_path, "ready $PYTHONPATH")
    assert measure(checkout, [], wait_s=0.0).phases[-1][1] == f"ready {tmp_path}"


def test_a_start_that_fails_is_an_error_with_what_it_printed(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path, "no room", then="kill $child; exit 3\n")
    with pytest.raises(RuntimeError, match=r"status 3: .*no room"):
        measure(checkout, [], wait_s=0.0)


def test_the_usage_is_at_least_that_of_the_process_itself() -> None:
    usage = usage_of(os.getpid())
    assert usage.num_processes >= 1
    assert usage.cpu_s > 0
    assert usage.pss_bytes > 10 << 20


def _starts(*seconds: float) -> list[Start]:
    return [Start(one, 2 * one, 3 << 20, 4 << 20, 5, ()) for one in seconds]


def test_medians_are_compared_within_pairs_if_there_are_enough() -> None:
    table = table_of({"A": _starts(1, 2, 3, 4, 5), "B": _starts(2, 4, 6, 8, 10)})
    columns = [list(column.cells) for column in table.columns]
    assert columns[1] == ["3.0", "6.0", "3.0", "4.0", "5.0"]
    assert columns[2][:2] == ["6.0", "12.0"]
    assert columns[3][:3] == ["2.00 (2.00 to 2.00)", "2.00 (2.00 to 2.00)", "1.00 (1.00 to 1.00)"]
    assert len(table_of({"A": _starts(1)}).columns) == 2
