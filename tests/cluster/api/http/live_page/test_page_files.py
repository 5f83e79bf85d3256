"""The page's files: what is vendored is what its makers have published, and nothing is loaded from elsewhere.

Tests of cluster/api/http/live_page/page_files.py.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

import pytest

from cluster.api.http.live_page.page_files import HEADERS, STATIC, page_files

ROOT: Final = Path(__file__).parents[5]
VENDORED: Final = STATIC / "vendor" / "uplot-1.6.32"
OWN: Final = sorted(path for path in STATIC.glob("*") if path.is_file())


def test_vendored_files_are_as_they_were_published() -> None:
    lines = [line.split() for line in (VENDORED / "SHA256SUMS").read_text().splitlines()]
    assert {name: checksum for checksum, name in lines} == {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for checksum, name in lines:
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == checksum, name
    others = {path.name for path in VENDORED.iterdir()} - {name for _, name in lines}
    assert others == {"SHA256SUMS"}, "every other file has a checksum"


def test_what_is_vendored_is_named_with_its_licence() -> None:
    notice = (ROOT / "THIRD_PARTY.md").read_text()
    licence = (VENDORED / "LICENSE").read_text()
    assert "uPlot 1.6.32" in notice
    assert licence.strip() in notice
    assert "1.6.32" in (STATIC / "vendor" / "VENDORED.md").read_text()


def test_every_file_that_the_page_names_is_served() -> None:
    files = page_files()
    index = files["/ui"].data.decode()
    named = {f"/{path}" for path in re.findall(r'(?:src|href)="(ui/[^"]+)"', index)}
    modules = {f"/ui/{path}" for one in files.values() for path in re.findall(r'from "\./([^"]+)"', one.data.decode())}
    assert named | modules <= set(files)
    assert set(files) - {"/ui"} == named | modules, "and no other one"


def test_licences_and_notes_are_not_served() -> None:
    assert all(path == "/ui" or path.endswith((".js", ".css")) for path in page_files())


def test_the_content_security_policy_allows_nothing_from_elsewhere_and_nothing_inline() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
    }


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_text_is_parsed_as_markup_and_nothing_comes_from_another_host(path: Path) -> None:
    text = path.read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage|sessionStorage"
    )
    assert re.findall(forbidden, text) == []
    assert re.findall(r"https?://", text) == []
    assert re.findall(r"<[^>]* (?:style|on[a-z]+)=", text) == [], "the policy forbids inline styles and handlers"
