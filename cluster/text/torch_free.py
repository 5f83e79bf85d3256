"""Processes that have no use for torch do not load it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NO_ADVICE: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers in here as if there were no torch, which nothing in this process can import from now on.

    transformers loads torch wherever it is installed, also for its tokenizers, which do without: 180 MiB of memory and
    2 s of processor time for an ingress. In a process that has torch already this changes nothing.
    """
    # As Python's import system has it: what is None here cannot be imported, and is not found.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # typeshed wants modules
    had = os.environ.get(_NO_ADVICE)
    # It would say that models are not available.
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        if had is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = had
