"""How the threads of OpenMP wait for work, which OpenMP reads once, when torch is loaded."""

from __future__ import annotations

import os

_WAIT_POLICY = "OMP_WAIT_POLICY"
_POLICIES = (_WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_without_spinning() -> None:
    """Let the threads of OpenMP sleep while they have no work, unless the environment says how they wait.

    Call it before torch is loaded. Both GNU's library, which comes with torch's wheels, and Intel's read the variable.
    By default GNU's threads spin for some milliseconds after each operator, which takes the cores from everything else
    on the host.
    """
    if not any(name in os.environ for name in _POLICIES):
        os.environ[_WAIT_POLICY] = "PASSIVE"
