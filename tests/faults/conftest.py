from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.faults.live_engines import LiveEngines


@pytest.fixture(params=[False, True], ids=["tcp", "shared memory"])
async def engines(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> AsyncIterator[LiveEngines]:
    """No engine yet; those that the test starts join by TCP, or through shared memory."""
    async with LiveEngines(checkpoint("llama"), is_pool_shared=bool(request.param)) as started:
        yield started
