from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.live_engines import EngineHouse, LiveEngines


@pytest.fixture(scope="package")
def house() -> Iterator[EngineHouse]:
    kept = EngineHouse()
    yield kept
    kept.end()


@pytest.fixture(params=[False, True], ids=["tcp", "shared memory"])
async def engines(
    request: pytest.FixtureRequest, house: EngineHouse, checkpoint: Callable[[str], Path]
) -> AsyncIterator[LiveEngines]:
    """No engine yet; those that the test starts are joined by TCP, or by shared memory."""
    async with LiveEngines(house, checkpoint("llama"), is_pool_shared=bool(request.param)) as started:
        yield started


@pytest.fixture
async def tcp_engines(house: EngineHouse, checkpoint: Callable[[str], Path]) -> AsyncIterator[LiveEngines]:
    """The same, by TCP only: for what does not depend on how bytes travel."""
    async with LiveEngines(house, checkpoint("llama")) as started:
        yield started
