from __future__ import annotations

import asyncio

import pytest

from cluster.api.shared.gate import Gate
from cluster.errors import Draining


async def test_a_closed_gate_lets_nobody_in_and_waits_for_those_inside() -> None:
    gate = Gate()
    async with gate:
        closing = asyncio.create_task(gate.close(grace_s=60))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            async with gate:
                pass
        assert not closing.done()
    assert await asyncio.wait_for(closing, timeout=10)


async def test_those_that_stay_too_long_are_reported() -> None:
    gate = Gate()
    async with gate:
        assert not await gate.close(grace_s=0)


async def test_a_call_that_fails_has_left() -> None:
    gate = Gate()
    with pytest.raises(ValueError, match="boom"):
        async with gate:
            raise ValueError("boom")
    assert await gate.close(grace_s=0)
