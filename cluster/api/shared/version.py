"""The version of raypd that runs."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def server_version() -> str:
    """Return the installed distribution's version. It is cached, because a look-up takes milliseconds."""
    try:
        return importlib.metadata.version("raypd")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"  # raypd runs from a working directory, as with `ray job submit --working-dir .`.
