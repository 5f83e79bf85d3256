"""Which raypd this is."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def server_version() -> str:
    """The installed distribution's version, which takes milliseconds to look up: every status has it."""
    try:
        return importlib.metadata.version("raypd")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"  # Run from a working directory, as `ray job submit --working-dir .` does.
