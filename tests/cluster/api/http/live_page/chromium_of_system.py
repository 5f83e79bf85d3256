"""The Chromium of the system, in which the live page is tested."""

from __future__ import annotations

import os
import shutil

import pytest


def chromium_path() -> str:
    """Its path. Without it the test is skipped, or fails if RAYPD_NEEDS_CHROMIUM is set, as `make test-all` does."""
    path = os.environ.get("RAYPD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is not None:
        return path
    reason = "the live page is tested in Chromium: apt-get install chromium, or set RAYPD_CHROMIUM to its path"
    if os.environ.get("RAYPD_NEEDS_CHROMIUM"):
        pytest.fail(reason)
    pytest.skip(reason)
