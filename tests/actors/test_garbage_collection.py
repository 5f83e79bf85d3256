from __future__ import annotations

import gc

import pytest

from actors.garbage_collection import leave_out_what_lives, no_collection


def test_nothing_is_collected_meanwhile_and_the_collector_is_as_before_afterwards() -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError), no_collection():
        fail()
    assert gc.isenabled()

    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_there_is_looked_at_no_more() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    before = gc.get_freeze_count()
    try:
        leave_out_what_lives()
        assert gc.get_freeze_count() > before
        assert not any(one is cycle for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is cycle for one in gc.get_objects())
