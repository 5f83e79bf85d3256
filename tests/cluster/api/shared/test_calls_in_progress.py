from __future__ import annotations

import asyncio

import pytest

from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.errors import Draining


async def test_new_calls_are_refused_after_close_which_waits_for_those_that_have_begun() -> None:
    in_progress = CallsInProgress()
    async with in_progress:
        closing = asyncio.create_task(in_progress.close(grace_s=600))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            async with in_progress:
                pass
        assert not closing.done()
    assert await asyncio.wait_for(closing, timeout=60)


async def test_those_that_stay_too_long_are_reported() -> None:
    in_progress = CallsInProgress()
    async with in_progress:
        assert not await in_progress.close(grace_s=0)


async def test_a_call_that_fails_has_left() -> None:
    in_progress = CallsInProgress()
    with pytest.raises(ValueError, match="boom"):
        async with in_progress:
            raise ValueError("boom")
    assert await in_progress.close(grace_s=0)
