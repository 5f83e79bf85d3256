"""Which raypd this is."""

from __future__ import annotations

import importlib.metadata


def server_version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("raypd")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"  # Run from a working directory, as `ray job submit --working-dir .` does.
