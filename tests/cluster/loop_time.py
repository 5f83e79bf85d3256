"""Time that passes when a test says so: a deadline is over at once, and never before what comes before it."""

from __future__ import annotations

import asyncio


def let_pass(duration_s: float) -> None:
    """Move the clock of the running event loop on; what has waited for less on it ends in the next turn."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + duration_s  # type: ignore[method-assign]  # the loop is this test's own
