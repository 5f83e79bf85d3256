"""Data on a connection has bounds before anybody looks at it.

Tests of cluster/settings/http.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from actors.core.requests.request import FinishReason
from cluster.api.http.receiving import protocol
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.serving_setup import assert_nothing_is_left

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> int:
        """The status of the next answer, whose body is read."""
        self.writer.write(data)
        return (await self.answer())[0]

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(60):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
            return int(first.split()[1]), headers, body

    async def has_ended(self) -> bool:
        async with asyncio.timeout(60):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


@asynccontextmanager
async def _client(setup: Setup) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (GET % (b"a: %b\r\n" % (b"b" * 70_000)), 431, "headers_too_large"),
        (GET[:-4] + b"a: " + b"b" * 100_000, 431, "headers_too_large"),
        (GET[:-4] + b"a" * 100_000, 431, "headers_too_large"),
        (GET % (b"a: b\r\n" * 300), 431, "headers_too_large"),
        (GET % (b"abcdefg: %b\r\n" % (b"b" * 1000) * 70), 431, "headers_too_large"),
        (b"GET /health?%b HTTP/1.1\r\n\r\n" % (b"a" * 9000), 414, "uri_too_long"),
        (b"GET /" + b"a" * 100_000, 414, "uri_too_long"),
        (b"\x16\x03\x01\x02\x00", 400, "no_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "no_http"),
    ],
    ids=[
        "one header",
        "a value without end",
        "a name without end",
        "many",
        "many large",
        "url",
        "endless",
        "tls",
        "h2",
    ],
)
async def test_what_is_too_much_is_answered_and_ends_the_connection(sent: bytes, status: int, code: str) -> None:
    async with http_setup() as setup, _client(setup) as client:
        client.writer.write(sent)
        answered, headers, body = await client.answer()
        assert (answered, json.loads(body)["error"]["code"]) == (status, code)
        assert headers["connection"] == "close"
        assert await client.has_ended()


async def test_headers_up_to_the_bound_are_read() -> None:
    async with http_setup() as setup, _client(setup) as client:
        for _ in range(2):
            assert await client.ask(GET % (b"abc: %b\r\n" % (b"b" * 4000) * 16)) == 200
        assert await client.ask(GET % (b"a: b\r\n" * 200)) == 200
        assert await client.ask(b"GET /health?%b HTTP/1.1\r\n\r\n" % (b"a" * 8000)) == 200


async def test_headers_that_come_byte_by_byte_are_counted_too() -> None:
    async with http_setup(HttpConfig(max_header_bytes=1024)) as setup, _client(setup) as client:
        client.writer.write(GET[:-4])
        for _ in range(200):
            client.writer.write(b"a: bcdef\r\n")
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 431


async def test_what_is_still_sent_after_a_refusal_does_not_take_the_answer_away() -> None:
    async with http_setup() as setup, _client(setup) as client:
        client.writer.write(GET[:-4])
        for _ in range(100):
            client.writer.write(b"a: %b\r\n" % (b"b" * 60_000))
        await client.writer.drain()
        assert (await client.answer())[0] == 431
        assert await client.has_ended()


async def test_requests_that_are_sent_ahead_are_answered_one_after_the_other() -> None:
    async with http_setup() as setup, _client(setup) as client:
        client.writer.write(GET % b"" * 5000)
        for _ in range(5000):
            assert (await client.answer())[0] == 200


async def test_a_request_that_is_sent_ahead_waits_for_an_answer_that_takes_its_time() -> None:
    async with http_setup() as setup, _client(setup) as client:
        body = b'{"prompt": "hello"}'
        client.writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body + GET % b"")
        producer, _ = await setup.pair.next_requests()
        client.writer.write(GET % (b"x: %b\r\n" % (b"y" * 1000)) * 300)
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        answers = [await client.answer() for _ in range(302)]
        assert b'"text":"a"' in answers[0][2]
        assert [status for status, _, _ in answers] == [200] * 302
        assert_nothing_is_left(setup.pair)


async def test_trailers_are_no_headers() -> None:
    async with http_setup() as setup, _client(setup) as client:
        chunks = b'13\r\n{"prompt": "hello"}\r\n0\r\nx-request-timeout: nonsense\r\n\r\n'
        client.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "chunk",
    [b"1;%b\r\n \r\n" % (b"a" * 500), b"1\r\n \r\n", b"0\r\n" + b"a: b\r\n" * 20_000],
    ids=["ext", "tiny", "trail"],
)
async def test_what_chunks_have_beside_their_content_is_bounded(chunk: bytes) -> None:
    async with http_setup() as setup, _client(setup) as client:
        client.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
        client.writer.write(chunk * 200_000 if len(chunk) < 10 else chunk * 400 if len(chunk) < 1000 else chunk)
        assert (await client.answer())[0] == 400
        assert await client.has_ended()
        assert_nothing_is_left(setup.pair)


async def test_small_chunks_within_the_bound_are_read() -> None:
    async with http_setup() as setup, _client(setup) as client:
        body = b'{"prompt": "hello", "user": "' + b"a" * 100_000 + b'"}'
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _parts(body, 30)) + b"0\r\n\r\n"
        client.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        assert (await client.answer())[0] == 200


def _parts(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


async def test_a_connection_too_many_ends_the_one_that_has_asked_nothing_for_longest() -> None:
    config = HttpConfig(max_connections=2)
    async with http_setup(config) as setup, _client(setup) as first, _client(setup) as second:
        assert await first.ask(GET % b"") == 200
        assert await second.ask(GET % b"") == 200
        async with _client(setup) as third:
            assert await third.ask(GET % b"") == 200
            assert await first.has_ended()
            assert await second.ask(GET % b"") == 200


async def test_a_connection_too_many_is_told_so_where_all_others_have_requests() -> None:
    async with http_setup(HttpConfig(max_connections=1)) as setup, _client(setup) as busy:
        busy.writer.write(POST + b'content-length: 19\r\n\r\n{"prompt": "hello"}')
        producer, _ = await setup.pair.next_requests()
        async with _client(setup) as refused:
            assert (await refused.answer())[0] == 503
            assert await refused.has_ended()
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.LENGTH)
        assert (await busy.answer())[0] == 200


async def test_empty_lines_without_end_are_not_read_for_long() -> None:
    async with http_setup(HttpConfig(receive_timeout_s=0.3)) as setup, _client(setup) as client:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # A busy machine may not be in time itself.
            assert await client.ask(GET % b"") == 200
        ended = asyncio.create_task(client.has_ended())
        async with asyncio.timeout(60):
            while not ended.done():
                client.writer.write(b"\r\n")
                await asyncio.sleep(0.01)


async def test_a_turn_of_the_event_loop_reads_a_bounded_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    read = protocol.BoundedProtocol._read_a_turn

    def read_noted(self: protocol.BoundedProtocol) -> None:
        before = len(self._waiting)
        read(self)
        sizes.append(before - len(self._waiting))

    monkeypatch.setattr(protocol.BoundedProtocol, "_read_a_turn", read_noted)
    async with http_setup() as setup, _client(setup) as client:
        body = b'{"prompt": "' + b"a" * 1_000_000 + b'"}'
        assert await client.ask(POST + b"content-length: %d\r\n\r\n" % len(body) + body) == 400
    assert max(sizes) <= protocol.BYTES_PER_TURN
    assert sum(sizes) > 1_000_000
