from __future__ import annotations

import gc

import pytest

from actors.garbage_collection import no_collection


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
