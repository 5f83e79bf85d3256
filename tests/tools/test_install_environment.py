"""uv is told what pip's settings say."""

from __future__ import annotations

import pytest

from tools.install_environment import uv_environment, uv_options

_LISTED = r"""
:env:.default-timeout='180'
:env:.find-links='/wheels'
global.cert='/certificates.pem'
global.extra-index-url='https://a.example/simple\nfile:///b/simple'
global.find-links='/elsewhere'
global.index-url='https://global.example/simple'
install.index-url='https://install.example/simple'
install.no-index='true'
download.index-url='https://download.example/simple'
"""


def test_uv_looks_where_pip_would() -> None:
    assert uv_options(_LISTED) == [
        *("--index-strategy", "unsafe-best-match"),
        *("--default-index", "https://install.example/simple"),
        *("--index", "https://a.example/simple", "--index", "file:///b/simple"),
        *("--find-links", "/wheels"),
        "--no-index",
    ]
    assert uv_options("") == ["--index-strategy", "unsafe-best-match"]


def test_uv_trusts_whom_pip_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert uv_environment(_LISTED)["SSL_CERT_FILE"] == "/certificates.pem"
    assert "SSL_CERT_FILE" not in uv_environment("")
