"""The files of the live page, read once from the package, and the headers with which they are answered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

STATIC: Final = Path(__file__).with_name("static")
PAGE_PATH: Final = "/ui"
EVENTS_PATH: Final = "/ui/events"
TRACE_PATH: Final = "/ui/trace.json"
REQUEST_PATH: Final = "/ui/request.json"
_INDEX: Final = "index.html"
_TYPES: Final = MappingProxyType(
    {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
)
"""The types of the files that are served; others, such as licences, are only in the package."""

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. media_type: with its charset"""

    data: bytes
    media_type: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by the paths at which they are served, such as /ui and /ui/main.js."""
    files = {
        f"{PAGE_PATH}/{path.relative_to(STATIC).as_posix()}": PageFile(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in _TYPES
    }
    files[PAGE_PATH] = files.pop(f"{PAGE_PATH}/{_INDEX}")
    return MappingProxyType(files)
