from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from actors.process.garbage_collection import no_collection
from tests.patience import TEST_S

_OPEN_STREAMS = """
import gc
from actors.process.garbage_collection import collect_seldom, leave_out_what_is_loaded

loaded = [[] for _ in range(100_000)]
leave_out_what_is_loaded()
left_out = gc.get_freeze_count()
collect_seldom()
generations = []
gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
streams = [[] for _ in range(360_000)]
print(left_out, generations.count(1), generations.count(2))
del streams
forgotten = []
forgotten.append(forgotten)
del forgotten
print(gc.collect())
"""
"""The script of a process that prints what is collected while the objects of 3000 streams are made."""


def test_nothing_is_collected_meanwhile_and_the_collector_is_as_before_afterwards() -> None:
    imported: list[list[int]] = []

    def fail() -> None:
        assert not gc.isenabled()
        imported.extend([] for _ in range(1000))
        raise KeyError

    assert gc.isenabled()
    left_out_before = gc.get_freeze_count()
    with pytest.raises(KeyError), no_collection():
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= left_out_before + len(imported)

    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_streams_that_are_opened_cause_no_full_collection_and_what_was_loaded_is_left_out() -> None:
    asked = [sys.executable, "-c", _OPEN_STREAMS]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=TEST_S).stdout.split()
    left_out, num_middle, num_full, num_freed = map(int, told)
    assert left_out > 100_000
    assert num_middle > 0
    assert num_full == 0
    assert num_freed == 1, "what is in a cycle is still found"
