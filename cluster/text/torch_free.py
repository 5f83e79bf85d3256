"""Keeps torch out of processes that have no use for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NO_ADVICE: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers in this context as if torch were not installed. The process cannot import torch afterwards.

    transformers loads torch if it is installed, even for its tokenizers, which do not need it: this takes 180 MiB of
    memory and 2 s of processor time of an ingress. In a process that has loaded torch already nothing changes.
    """
    # Python's import system does not import a module whose entry is None, and does not find it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # typeshed wants modules
    had = os.environ.get(_NO_ADVICE)
    # Otherwise transformers would warn that models are not available.
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        if had is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = had
