"""Opens the live page in a browser, and notes all that it complains about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from playwright.async_api import Browser, Page

PATIENCE_MS: Final = 60_000
"""How long a page that is not yet as it should be is looked at again: the machine may be busy."""


@dataclass
class OpenedPage:
    """A page, and all that it complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def note_request(self, url: str, port: int) -> None:
        """Keep a request that is not for the page's own server."""
        if not url.startswith((f"http://127.0.0.1:{port}/", "data:")):
            self.foreign.append(url)


@asynccontextmanager
async def opened(chromium: Browser, port: int, *, width: int = 1200, dark: bool = False) -> AsyncIterator[OpenedPage]:
    """Open the page of a server in a context of its own."""
    context = await chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    )
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    one = OpenedPage(page)
    page.on("console", lambda message: one.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: one.complaints.append(str(error)))
    page.on("request", lambda request: one.note_request(request.url, port))
    await page.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) => "
        "console.error('policy', event.violatedDirective, event.blockedURI))"
    )
    await page.goto(f"http://127.0.0.1:{port}/ui")
    try:
        yield one
    finally:
        await context.close()
