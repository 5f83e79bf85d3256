from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from cluster.api.protos.side_by_side import side_by_side


class Prompt:
    """Large, in earnest."""


async def test_streams_that_fail_leave_nothing_to_the_garbage_collector() -> None:
    """An ingress collects seldom: what is in a cycle stays for long, and calls that are refused are cheap to make."""
    kept: list[weakref.ref[Prompt]] = []

    async def failing() -> AsyncGenerator[int, None]:
        prompt = Prompt()
        kept.append(weakref.ref(prompt))
        if kept:
            raise ValueError("it is refused")
        yield 1

    async def read_all() -> None:
        async with aclosing(side_by_side([failing() for _ in range(5)])) as items:
            async for _ in items:
                pass

    gc.disable()
    try:
        with pytest.raises(ValueError, match="it is refused") as raised:
            await read_all()
        raised.value.__traceback__ = None
        del raised
        assert [prompt() for prompt in kept] == [None] * 5
    finally:
        gc.enable()
