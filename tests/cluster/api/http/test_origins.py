"""Web pages of other origins: browsers ask first, and are told who may call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
import yaml
from pydantic import ValidationError

from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import http_setup

PAGE = "https://chat.example.org"
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize(
    ("allowed", "origin", "answered"),
    [((PAGE,), PAGE, PAGE), (("*",), PAGE, "*"), ((PAGE,), "https://evil.example.org", None), ((), PAGE, None)],
)
async def test_pages_of_allowed_origins_alone_may_call(
    allowed: tuple[str, ...], origin: str, answered: str | None
) -> None:
    async with http_setup(HttpConfig(allowed_origins=allowed)) as setup:
        asked = await setup.http.options("/v1/completions", headers={"origin": origin, **ASKED})
        called = await setup.http.get("/v1/models", headers={"origin": origin})
        failed = await setup.http.post("/v1/completions", headers={"origin": origin}, json={"prompt": ""})

    assert (asked.status_code == 200) == (answered is not None)
    if not allowed:
        assert asked.status_code == 405
    assert (called.status_code, failed.status_code) == (200, 400)
    for response in (asked, called, failed):
        assert response.headers.get("access-control-allow-origin") == answered
    if answered is not None:
        assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
        assert "retry-after" in called.headers["access-control-expose-headers"]


async def test_browsers_may_ask_without_a_token_and_nothing_else(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": [{"name": "a", "sha256": hash_token("secret")}]}))
    access = AccessControl(Tokens(tokens))
    async with http_setup(HttpConfig(allowed_origins=(PAGE,)), access) as setup:
        asked = await setup.http.options("/v1/models", headers={"origin": PAGE, **ASKED})
        called = await setup.http.get("/v1/models", headers={"origin": PAGE})

    assert (asked.status_code, called.status_code) == (200, 401)
    assert called.headers["access-control-allow-origin"] == PAGE


async def test_a_page_can_read_a_stream() -> None:
    async with http_setup(HttpConfig(allowed_origins=(PAGE,))) as setup:
        body = {"prompt": "hello", "stream": True}
        asking = asyncio.create_task(setup.http.post("/v1/completions", json=body, headers={"origin": PAGE}))
        await setup.answer("Hi")
        answer: httpx2.Response = await asking

    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/page", "https://*.org", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError):
        HttpConfig(allowed_origins=(origin,))
