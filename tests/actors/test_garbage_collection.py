from __future__ import annotations

import gc
import subprocess
import sys

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


def test_what_is_there_is_looked_at_no_more() -> None:
    # In a process of its own: this one has to go on being collected.
    code = (
        "import gc; from actors.garbage_collection import leave_out_what_lives; there, later = [], [];"
        "leave_out_what_lives(); later = [later];"
        "print(*(any(one is other for other in gc.get_objects()) for one in (there, later)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == "False True\n"
