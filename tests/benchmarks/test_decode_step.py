"""Tests of benchmarks/decode_step.py."""

from __future__ import annotations

import pytest

from actors.core.scheduler import Scheduler
from benchmarks import decode_step


def test_each_part_of_a_step_is_timed_and_unwrapped_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unwrapped = Scheduler.schedule
    decode_step.run(batch=2, context=20, steps=10, attention_backend="torch")
    lines = {line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert lines == {
        "schedule",
        "update",
        "input batch: update",
        "input batch: prepare",
        "attention: step metadata",
        "attention: all layers (inside forward)",
        "forward",
        "sample",
        "sample: bookkeeping",
        "input batch: extend",
        "input batch: fill",
        "collect",
        "output messages: encode",
        "rest",
        "step",
    }
    assert Scheduler.schedule is unwrapped
