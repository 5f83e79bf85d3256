"""The cheap path of an endpoint picker is answered on its connection, as the application would answer it.

Tests of cluster/api/http/receiving/protocol.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from cluster.access.access_control import AccessControl
from cluster.access.caller import Caller
from cluster.access.tokens import Tokens
from cluster.api.http.server import HttpServer
from cluster.observability.load_counts import RequestLoad
from cluster.observability.vllm_dialect import IngressLoad, VllmDialect
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import chat_pair, view_of

PATH = b"/metrics/vllm"


@dataclass
class Served:
    """A server with vLLM's names. counted: its answers, by path and status"""

    port: int
    counted: list[tuple[str, int]] = field(default_factory=list)

    async def ask(self, sent: bytes, *, until: bytes = b"") -> bytes:
        """All that comes back until `until` has come, or the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        received = b""
        async with asyncio.timeout(60):
            while not until or until not in received:
                data = await reader.read(65_536)
                if not data:
                    break
                received += data
        writer.close()
        return received


@asynccontextmanager
async def served(access: AccessControl | None = None, *, has_dialect: bool = True) -> AsyncIterator[Served]:
    serving = chat_pair().serving
    load = IngressLoad(RequestLoad(3, 5, ("sql",), ("chat",)), num_blocks=8)
    made = Served(0)

    def count(path: str, status: int) -> None:
        made.counted.append((path, status))

    serving.metrics.on_http = count  # type: ignore[method-assign]  # it records what would be counted
    dialect = VllmDialect(serving.metrics, lambda: load, lambda: 1.0, lambda: 2.0)
    server = HttpServer(
        serving,
        view_of(serving),
        HttpConfig(port=0),
        60.0,
        host="127.0.0.1",
        access=access,
        dialect=dialect if has_dialect else None,
    )
    made.port = await server.start()
    try:
        yield made
    finally:
        await server.drain(0)


def get(*headers: bytes, method: bytes = b"GET", path: bytes = PATH, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"%b %b HTTP/%b" % (method, path, version), *headers, b"", b""])


HOST = b"host: localhost"


def without_date(answer: bytes) -> list[bytes]:
    return sorted(line for line in answer.splitlines() if not line.startswith(b"date: "))


async def test_the_answer_is_the_applications() -> None:
    async with served() as server:
        at_once = await server.ask(get(HOST), until=b"num_requests_running{")
        # A query is no part of the path that is known at once.
        by_application = await server.ask(get(HOST, path=PATH + b"?a=b"), until=b"num_requests_running{")
        assert b"date: " in at_once
        assert without_date(at_once) == without_date(by_application)
        assert server.counted == [("/metrics/vllm", 200)] * 2


async def test_calls_on_one_connection_are_answered_in_turn() -> None:
    health = get(HOST, path=b"/health")
    async with served() as server:
        sent = get(HOST) + health + get(HOST) + get(HOST) + health + get(HOST, path=b"/no")
        received = await server.ask(sent, until=b"404 Not Found")
        parts = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
        assert parts == [b"200"] * 5 + [b"404"]
        assert [path for path, _ in server.counted] == [
            *("/metrics/vllm", "/health", "/metrics/vllm", "/metrics/vllm", "/health", "")
        ]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (get(b"host: evil.example", b"connection: close"), b"421"),
        (get(HOST, b"connection: close"), b"200"),
        (get(HOST, version=b"1.0"), b"200"),
        (get(HOST, b"connection: close", method=b"POST"), b"405"),
        (get(HOST, b"content-length: 2", b"connection: close") + b"{}", b"200"),
        (get(HOST, b"upgrade: websocket", b"connection: upgrade, close"), b"200"),
    ],
    ids=["another host", "closing", "old", "post", "body", "upgrade"],
)
async def test_what_is_not_plain_is_for_the_application(sent: bytes, status: bytes) -> None:
    async with served() as server:
        assert (await server.ask(sent)).split()[1] == status
        assert len(server.counted) == 1


async def test_without_the_dialect_the_application_says_what_is_missing() -> None:
    async with served(has_dialect=False) as server:
        assert b"metrics_dialects" in await server.ask(get(HOST), until=b"metrics_dialects")


class _Known(Tokens):
    """The tokens `all`, whose caller may use any adapter, and `few`."""

    def __init__(self) -> None:
        pass

    def find(self, token: str) -> Caller | None:
        return {"all": Caller(name="all"), "few": Caller(name="few", adapters=frozenset({"sql"}))}.get(token)


@pytest.mark.parametrize(
    ("headers", "status", "names_adapters"),
    [
        ([], b"401", False),
        ([b"authorization: Bearer wrong"], b"401", False),
        ([b"Authorization: Bearer all"], b"200", True),
        ([b"authorization: bearer few"], b"200", False),
        ([b"authorization: Bearer few", b"authorization: Bearer all"], b"200", False),
    ],
    ids=["none", "unknown", "any adapter", "few adapters", "the first one counts"],
)
async def test_a_caller_needs_a_token_and_learns_of_no_adapters_of_others(
    headers: list[bytes], status: bytes, names_adapters: bool
) -> None:
    async with served(AccessControl(_Known())) as server:
        answer = await server.ask(get(HOST, *headers) + get(HOST, *headers, b"connection: close"))
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [status] * 2
        assert answer.count(b"vllm:lora_requests_info{") == (2 if names_adapters else 0)


async def test_answers_that_nobody_reads_do_not_pile_up() -> None:
    """A client that only sends costs as much memory as a socket and the connection's buffer hold, and no more."""
    async with served() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = get(HOST) * 20_000
        writer.write(sent)
        async with asyncio.timeout(60):
            before = -1
            while len(server.counted) != before or not before:
                before = len(server.counted)
                await asyncio.sleep(0.3)
        assert before < 5000
        writer.transport.abort()
