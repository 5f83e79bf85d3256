"""Connections that want TLS count from their first byte on, have to shake hands in time, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cluster.access.server_tls import ServerTls, TlsConfig
from cluster.api.http.receiving.tls_connection import TlsConnection
from cluster.api.http.server import HttpServer
from cluster.settings.http import HttpConfig
from tests.cluster.access.certificates import Authority
from tests.cluster.api.http.http_setup import chat_pair, view_of

_CALL = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def served(directory: Path, **config: float) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """Serve; yields the port, and what a client needs."""
    authority = Authority(directory, "authority")
    files = authority.certify("server")
    tls = ServerTls(TlsConfig(certificate=files.certificate, key=files.key)).ssl_context()
    serving = chat_pair().serving
    settings = HttpConfig.model_validate({"port": 0, **config})
    server = HttpServer(serving, view_of(serving), settings, slow_reader_timeout_s=60.0, tls=tls, host="127.0.0.1")
    port = await server.start()
    try:
        yield port, ssl.create_default_context(cafile=authority.root)
    finally:
        await server.drain(0)


async def call(port: int, context: ssl.SSLContext) -> bytes:
    """Ask over TLS whether the server lives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(_CALL)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_handshake_that_does_not_end_is_cut_off_in_time(tmp_path: Path) -> None:
    async with asyncio.timeout(60), served(tmp_path, receive_timeout_s=0.2) as (port, context):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01\x02\x00")
        assert await reader.read() == b""
        writer.close()
        answer = b""
        while b"200 OK" not in answer:
            with suppress(OSError):  # A busy machine may not shake hands in time itself.
                answer = await call(port, context)


async def test_a_handshake_that_does_not_end_gives_way_to_a_client_that_asks(tmp_path: Path) -> None:
    async with asyncio.timeout(60), served(tmp_path, max_connections=2) as (port, context):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert b"200 OK" in await call(port, context)
        assert await silent[0][0].read() == b"", "the oldest one"
        for _, writer in silent:
            writer.transport.abort()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_connections() -> int:
    return sum(isinstance(one, TlsConnection) for one in gc.get_objects())


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_a_connection_without_a_handshake_leaves_nothing(
    first: bytes, tmp_path: Path, no_collection: None
) -> None:
    async with asyncio.timeout(60), served(tmp_path) as (port, context):
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            await writer.drain()
            writer.transport.abort()
        assert b"200 OK" in await call(port, context)
        while num_connections() > 2:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
