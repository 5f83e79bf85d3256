"""A call's headers are checked before its body is received.

Tests of cluster/api/http/receiving/authentication.py, cluster/api/http/receiving/body_limits.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from actors.core.requests.request import FinishReason
from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token
from cluster.api.http.receiving.body_budget import FREE_BYTES, BodyBudget
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import Setup, http_setup

TOKEN = "authorization: Bearer secret"
JSON = "content-type: application/json"


def _access(directory: Path, **limits: float) -> AccessControl:
    file = directory / "tokens.yaml"
    file.write_text(yaml.safe_dump({"tokens": [{"name": "ann", "sha256": hash_token("secret"), **limits}]}))
    return AccessControl(Tokens(file))


async def _answer_before_body(setup: Setup, path: str, headers: Sequence[str], method: str = "POST") -> tuple[int, str]:
    """Announce a body, of which only the beginning comes; status and connection header of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
    try:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-length: 1000000", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + b'{"prompt": "' + b"a" * 100_000)
        async with asyncio.timeout(60):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.read()
        [connection] = [line.partition(": ")[2] for line in head.splitlines() if line.startswith("connection:")]
        return int(head.split()[1]), connection
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/nothing", "/v1/models", "/metrics", "/v1/models/", "/health/"]
)
async def test_without_a_token_nothing_is_received_or_told(path: str, tmp_path: Path) -> None:
    async with http_setup(access=_access(tmp_path)) as setup:
        for headers in ([JSON], [JSON, "authorization: Bearer wrong"], [JSON, "authorization: Basic x"], []):
            assert await _answer_before_body(setup, path, headers) == (401, "close")
            assert await _answer_before_body(setup, path, headers, "DELETE") == (401, "close")


async def test_with_a_token_paths_and_methods_are_told_of_before_the_body(tmp_path: Path) -> None:
    async with http_setup(access=_access(tmp_path)) as setup:
        assert await _answer_before_body(setup, "/v1/nothing", [JSON, TOKEN]) == (404, "close")
        assert await _answer_before_body(setup, "/v1/completions", [JSON, TOKEN], "GET") == (405, "close")
        assert await _answer_before_body(setup, "/ping", []) == (200, "close")


async def test_a_body_that_is_announced_as_too_large_is_not_received() -> None:
    async with http_setup(HttpConfig(max_body_bytes=999_999)) as setup:
        assert await _answer_before_body(setup, "/v1/completions", [JSON]) == (413, "close")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 400),
        ("Application/JSON; charset=utf-8", 400),
        ("application/vnd.raypd+json", 400),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=a", 415),
        ("text/plain; application/json", 415),
        ("text/json", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
async def test_bodies_say_that_they_are_json(kind: str, status: int) -> None:
    async with http_setup() as setup:
        answer = await setup.http.post("/v1/completions", content=b"{}", headers={"content-type": kind} if kind else {})
        assert answer.status_code == status
        if status == 415:
            message = answer.json()["error"]["message"]
            assert "content-type: application/json" in message
            assert not kind or kind in message
            assert await _answer_before_body(setup, "/v1/completions", [f"content-type: {kind}"]) == (415, "close")


async def test_whoever_has_spent_what_it_may_is_refused_before_the_body(tmp_path: Path) -> None:
    async with http_setup(access=_access(tmp_path, requests_per_s=0.001, burst_s=2000)) as setup:
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        asking = asyncio.create_task(setup.http.post("/v1/completions", json={"prompt": "hello"}, headers=headers))
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        assert (await asking).status_code == 200, "one request, which is counted once"
        assert (await setup.http.post("/v1/completions", content=b"{", headers=headers)).status_code == 400
        assert await _answer_before_body(setup, "/v1/completions", [JSON, TOKEN]) == (429, "close")


async def test_bodies_are_bounded_over_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    is_here, take = asyncio.Event(), BodyBudget.take

    def take_noted(budget: BodyBudget, token_name: str, num_bytes: int) -> None:
        take(budget, token_name, num_bytes)
        if budget.num_bytes == len(first) - 1 - FREE_BYTES:
            is_here.set()

    monkeypatch.setattr(BodyBudget, "take", take_noted)
    async with http_setup(HttpConfig(max_bodies_mib=1)) as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{JSON}\r\ncontent-length: %d\r\n\r\n"
        first = b'{"prompt": "' + b"a" * 900_000 + b'"}'
        writer.write((head % len(first)).encode() + first[:-1])
        second = {"prompt": "a" * 900_000}
        async with asyncio.timeout(60):
            await is_here.wait()
            answer = await setup.http.post("/tokenize", json=second)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
            assert "retry-after" in answer.headers
            assert (await setup.http.post("/tokenize", json={"prompt": "hello"})).status_code == 200, "a small one"
            writer.write(first[-1:])
            assert b" 200 " in await reader.readline()
            assert (await setup.http.post("/tokenize", json=second)).status_code == 200
        writer.close()
        await writer.wait_closed()
