"""The browser of the tests of the live page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.cluster.api.http.live_page.chromium_of_system import chromium_path
from tests.cluster.api.http.live_page.opened_page import PATIENCE_MS

_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One browser for all tests; each has a page of its own. The end of playwright's driver ends it, too."""
    path = chromium_path()
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(_FLAGS), timeout=2 * PATIENCE_MS)
        yield browser
        await browser.close()
