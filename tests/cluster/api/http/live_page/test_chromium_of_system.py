"""Whether there is a Chromium for the tests of the live page, which are of `make test-more`.

Only this test of it is of `make test`, so that who runs that learns what is not tested, and how it could be.
Tests of cluster/api/http/live_page/static.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.cluster.api.http.live_page.chromium_of_system import chromium_path


def test_the_chromium_of_the_system_can_be_run() -> None:
    asked = subprocess.run([chromium_path(), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"Chrom\w+ \d+", asked.stdout)


def test_without_chromium_tests_are_skipped_or_fail_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPD_CHROMIUM", raising=False)
    monkeypatch.delenv("RAYPD_NEEDS_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        chromium_path()
    monkeypatch.setenv("RAYPD_NEEDS_CHROMIUM", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        chromium_path()
