"""Attacks by clients that send by HTTP, to take an ingress down, or others' answers away.

Bodies are as large as max_body_bytes lets them be, or as small as what is read in one piece; both sizes were enough.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cluster.api.http.receiving.entries import count_entries
from tests.attacks.target import Attack, Target

_MAX_BODY_BYTES: Final = 16 * 2**20 - 200
_SMALL_BYTES: Final = 2**18 - 200
_TIMEOUT_S: Final = 120.0
_NUM_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body of `size` bytes, which is `before`, as many times `entry` as there is room for, and `after`.

    statuses: with which it may be answered
    """

    name: str
    path: str
    before: bytes
    entry: bytes
    after: bytes
    statuses: frozenset[int] = frozenset({400})

    def make(self, size: int) -> bytes:
        """Entries end with commas, or with nothing; the last one is made right."""
        return self.of(max(1, (size - len(self.before) - len(self.after)) // len(self.entry)))

    def of(self, num_entries: int) -> bytes:
        return self.before + (self.entry * num_entries).rstrip(b",") + self.after

    def make_within_bounds(self, size: int) -> bytes:
        """Make a body with as many entries as are let in to be parsed."""
        num = max(1, (size - len(self.before) - len(self.after)) // len(self.entry))
        step = num
        while step := step // 2:
            *_, counts = count_entries(self.of(num))
            num += -step if counts.excess() else step if len(self.of(num + step)) <= size else 0
        return self.of(max(1, num - 64))


def _bodies() -> list[HostileBody]:
    chat, completions, embeddings = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    message = b'"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]'
    answered = frozenset({200, 400, 429})
    return [
        HostileBody("empty objects", embeddings, b'{"input": [', b"{},", b"]}"),
        HostileBody("empty lists", completions, b'{"echo": true, "prompt": [', b"[],", b"]}"),
        HostileBody("lists of one token", completions, b'{"echo": true, "prompt": [', b"[1],", b"]}"),
        HostileBody("empty texts", completions, b'{"prompt": [', b'"",', b"]}"),
        HostileBody("short texts", embeddings, b'{"input": [', b'"ab",', b"]}"),
        HostileBody("tokens", completions, b'{"max_tokens": 1, "prompt": [', b"300,", b"300]}", answered),
        HostileBody("tokens to detokenize", "/detokenize", b'{"tokens": [', b"7,", b"7]}", answered),
        HostileBody("negative tokens", "/detokenize", b'{"tokens": [', b"-7,", b"-7]}"),
        HostileBody("slow numbers", completions, b'{"prompt": [', b"1.2345678901234567e-100,", b"1]}"),
        HostileBody("large numbers", completions, b'{"prompt": [', b"9" * 4000 + b",", b"1]}"),
        HostileBody("numbers of 18 digits", completions, b'{"prompt": [', b"9" * 18 + b",", b"1]}"),
        HostileBody("numbers with fractions", completions, b'{"prompt": [', b"1.5,", b"1.5]}"),
        HostileBody("messages", chat, b'{"max_tokens":1,"messages": [', b'{"role":""},', b"]}", answered),
        HostileBody("messages that are wrong", chat, b'{"max_tokens":1,"messages": [', b'{"rule":""},', b"]}"),
        HostileBody(
            "parts",
            chat,
            b'{"max_tokens":1,"messages":[{"role":"user","content":[',
            b'{"type":"text","text":""},',
            b"]}]}",
            answered,
        ),
        HostileBody(
            "parts of no kind", chat, b'{"max_tokens":1,"messages":[{"role":"user","content":[', b"{},", b"]}]}"
        ),
        HostileBody(
            "images",
            chat,
            b'{"max_tokens":1,"messages":[{"role":"user","content":[',
            b'{"type":"image_url","image_url":{"url":"data:"}},',
            b"]}]}",
        ),
        HostileBody(
            "tools", chat, b"{" + message + b',"tools":[', b'{"type":"function","function":{"name":"f"}},', b"]}"
        ),
        HostileBody(
            "numbers in a tool",
            chat,
            b"{"
            + message
            + b',"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":{"a":[',
            b"1,",
            b"1]}}}]}",
        ),
        HostileBody(
            "objects in a variable",
            chat,
            b"{" + message + b',"chat_template_kwargs":{"a":[',
            b'{"b":1},',
            b"]}}",
            answered,
        ),
        HostileBody(
            "arguments",
            chat,
            b'{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\\"a\\":[',
            b"{},",
            b']}"}}]}]}',
            answered,
        ),
        HostileBody(
            "turns with calls",
            chat,
            b'{"max_tokens":1,"messages":[',
            b'{"role":"","tool_calls":[{"id":"","function":{"name":"","arguments":"{}"}}]},',
            b"]}",
            answered,
        ),
        HostileBody(
            "turns with parts",
            chat,
            b'{"max_tokens":1,"messages":[',
            b'{"role":"","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},',
            b"]}",
            answered,
        ),
        HostileBody(
            "tool calls",
            chat,
            b'{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
            b'{"id":"","function":{"name":"","arguments":"{}"}},',
            b"]}]}",
            answered,
        ),
        HostileBody("stop strings", completions, b'{"prompt":"a","stop":[', b'"a",', b"]}"),
        HostileBody("stop tokens", completions, b'{"prompt":"a","stop_token_ids":[', b"1,", b"1]}"),
        HostileBody(
            "allowed tokens", completions, b'{"prompt":"a","allowed_token_ids":[', b"1,", b"1]}", frozenset({200, 400})
        ),
        HostileBody("bad words", completions, b'{"prompt":"a","bad_words":[', b'"a",', b"]}"),
        HostileBody("choices", completions, b'{"prompt":"a","guided_choice":[', b'"a",', b"]}"),
        HostileBody("entries of a schema", completions, b'{"prompt":"a","guided_json":{"enum":[', b"[0],", b"]}}"),
        HostileBody(
            "texts of a schema",
            chat,
            b"{" + message + b',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[',
            b'"a",',
            b"]}}}}",
        ),
        HostileBody("a long text in a schema", completions, b'{"prompt":"a","guided_json":{"title":"', b"a", b'"}}'),
        HostileBody("documents", "/rerank", b'{"query":"a","documents":[', b'"a",', b"]}"),
        HostileBody("pairs", "/score", b'{"text_1":"a","text_2":[', b'"a",', b"]}"),
        HostileBody("documents of a chat", chat, b"{" + message + b',"documents":[', b'{"a":"b"},', b"]}", answered),
        HostileBody("depth", completions, b'{"prompt":', b"[", b""),
        HostileBody("depth of objects", completions, b'{"prompt":', b'{"a":', b""),
        HostileBody("one field many times", completions, b'{"prompt":"a",', b'"user":"b",', b'"user":"c","n":0}'),
        HostileBody("one long text", completions, b'{"max_tokens":1,"prompt":"', b"a", b'"}', answered),
        HostileBody("escapes", completions, b'{"max_tokens":1,"prompt":"', b"\\u00e9", b'"}', answered),
        HostileBody("backslashes", completions, b'{"max_tokens":1,"prompt":"', b"\\\\", b'"}', answered),
        HostileBody("quotes", completions, b'{"max_tokens":1,"prompt":"', b'\\"', b'"}', answered),
        HostileBody("four bytes each", completions, b'{"max_tokens":1,"prompt":"', "😀".encode(), b'"}', answered),
        HostileBody("one wide character", completions, '{"max_tokens":1,"prompt":"😀'.encode(), b"a", b'"}', answered),
        HostileBody("a long number", completions, b'{"prompt":"a","max_tokens":1,"n":1', b"0", b"}", answered),
        HostileBody("spaces", completions, b"{", b" ", b'"n":0}'),
        HostileBody("no JSON", completions, b"", b"}", b""),
        HostileBody("no UTF-8", completions, b'{"prompt":"', b"\xff", b'"}'),
        HostileBody(
            "a long name of a model", completions, b'{"prompt":"a","model":"', b"a", b'"}', frozenset({400, 404})
        ),
        HostileBody("a long salt", completions, b'{"prompt":"a","cache_salt":"', b"a", b'"}'),
        HostileBody("a long id", completions, b'{"prompt":"a","request_id":"', b"a", b'"}'),
        HostileBody("a long pattern", completions, b'{"prompt":"a","guided_regex":"', b"a", b'"}'),
    ]


async def _send_body(body: HostileBody, make: Callable[[], bytes], target: Target) -> None:
    """Some of them one after the other, then some at once."""
    data = make()
    for num_at_once in (1, 1, 4 if len(data) > _SMALL_BYTES else _NUM_AT_ONCE):
        statuses = await asyncio.gather(*(post(target, body.path, data) for _ in range(num_at_once)))
        allowed = body.statuses | ({429} if num_at_once > 1 else set())
        assert set(statuses) <= allowed, f"{body.name} was answered {statuses}"


async def post(target: Target, path: str, body: bytes, headers: Sequence[str] = ()) -> int:
    """The status of a call."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: 127.0.0.1:{target.http_port}",
        "content-type: application/json",
        "connection: close",
        f"authorization: Bearer {target.token}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return status_in(await sent(target, "\r\n".join([*lines, "", ""]).encode() + body))


def status_in(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


async def sent(target: Target, data: bytes) -> bytes:
    """Send the data. Returns what comes until the server ends the connection, or nothing more comes."""
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await target.connect_http()
        answer = b""
        try:
            with suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            with suppress(ConnectionError):
                while part := await reader.read(65_536):
                    answer += part
        finally:
            writer.transport.abort()
        return answer


async def _endless(target: Target, head: bytes, part: bytes, statuses: set[int], num_bytes: int = 64 << 20) -> None:
    """Send a head that goes on and on, over some connections at once; each is answered, and ended."""

    async def send_one() -> int:
        reader, writer = await target.connect_http()
        try:
            writer.write(head)
            with suppress(ConnectionError):
                for _ in range(num_bytes // len(part)):
                    writer.write(part)
                    await writer.drain()
            with suppress(ConnectionError):
                return status_in(await reader.read(65_536))
            return 0
        finally:
            writer.transport.abort()

    async with asyncio.timeout(_TIMEOUT_S):
        answered = await asyncio.gather(*(send_one() for _ in range(4)))
    assert set(answered) <= statuses | {0}, answered


def _endless_attack(name: str, head: bytes, part: bytes, *statuses: int) -> Attack:
    async def send(target: Target) -> None:
        own = head.replace(b"TOKEN", target.token.encode())
        await _endless(target, own, part, set(statuses))

    return Attack(f"http: {name}", send)


_POST: Final = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_WITH_TOKEN: Final = _POST + b"authorization: Bearer TOKEN\r\n"
_LENGTH: Final = b"content-length: 16000000\r\n\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n\r\n"


async def _unfinished(target: Target, token: str, num_connections: int) -> None:
    """Bodies whose last byte does not come."""
    head = _POST + b"authorization: Bearer %b\r\n" % token.encode() + _LENGTH
    connections = [await target.connect_http() for _ in range(num_connections)]

    async def send(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(3):
                writer.write(head + b"[" + b" " * 15_000_000)
                await writer.drain()

    try:
        await asyncio.gather(*(send(writer) for _, writer in connections))
    finally:
        for _, writer in connections:
            writer.transport.abort()


async def _unfinished_with_wrong_tokens(target: Target) -> None:
    await _unfinished(target, "wrong", 30)


async def _unfinished_with_a_token(target: Target) -> None:
    await _unfinished(target, target.token, 20)


async def _many_connections(target: Target) -> None:
    """More than there may be, none of which asks anything, and some that ask half."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(5000):
            _, writer = await target.connect_http()
            writer.write(b"GET / HT" if number % 2 else b"")
            writers.append(writer)
        assert await post(target, "/tokenize", b'{"prompt": "hello"}') == 200
    finally:
        for writer in writers:
            writer.transport.abort()


async def _sent_ahead(target: Target) -> None:
    requests = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000
    reader, writer = await target.connect_http()

    async def read() -> int:
        count = 0
        while count < 20_000 and (part := await reader.read(65_536)):
            count += part.count(b'{"status":"ok"}')
        return count

    try:
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            writer.write(requests)
            await writer.drain()
            assert await reading > 19_000, "some are cut in two where parts meet"
    finally:
        writer.transport.abort()


async def _nobody_reads(target: Target) -> None:
    """Documents that strangers may have, and do not take."""
    requests = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    connections = [await target.connect_http() for _ in range(50)]
    try:
        for _, writer in connections:
            writer.write(requests)
        await asyncio.sleep(1)
    finally:
        for _, writer in connections:
            writer.transport.abort()


async def _streams_that_nobody_reads(target: Target) -> None:
    """60 streams of tokens."""
    body = b'{"prompt": "x", "max_tokens": 3000, "ignore_eos": true, "stream": true}'
    head = _POST + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (target.token.encode(), len(body))
    connections = [await target.connect_http() for _ in range(60)]
    try:
        for reader, writer in connections:
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # a reader takes 128 KiB by itself
            writer.write(head + body)
        await asyncio.sleep(1.5)
    finally:
        for _, writer in connections:
            writer.transport.abort()


_CONNECTIONS: Final = [
    _endless_attack("headers without end", _POST, b"a: b\r\n" * 10_000, 431),
    _endless_attack("long headers without end", _POST, b"a: %b\r\n" % (b"b" * 60_000), 431),
    _endless_attack("one header without end", _POST + b"a: ", b"b" * 60_000, 431),
    _endless_attack("a URL without end", b"GET /", b"a" * 60_000, 414),
    _endless_attack("empty lines without end", b"", b"\r\n" * 30_000),
    _endless_attack("random bytes", b"\x00\xff", b"\x07\xfe" * 30_000, 400),
    _endless_attack(
        "a body with a wrong token", _POST + b"authorization: Bearer wrong\r\n" + _LENGTH, b" " * 60_000, 401
    ),
    _endless_attack("chunks with a wrong token", _POST + _CHUNKED, b"ea60\r\n" + b" " * 60_000 + b"\r\n", 401),
    _endless_attack("a body where none is asked for", b"GET /health HTTP/1.1\r\n" + _LENGTH, b" " * 60_000, 200),
    _endless_attack("chunks of a byte", _WITH_TOKEN + _CHUNKED, b"1\r\n \r\n" * 10_000, 400),
    _endless_attack("a chunk's extension without end", _WITH_TOKEN + _CHUNKED + b"1;", b"a" * 60_000, 400),
    _endless_attack("chunks without end", _WITH_TOKEN + _CHUNKED, b"ea60\r\n" + b" " * 60_000 + b"\r\n", 413),
    _endless_attack("trailers without end", _WITH_TOKEN + _CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000, 400),
    Attack("http: bodies with wrong tokens that do not end", _unfinished_with_wrong_tokens),
    Attack("http: bodies that do not end", _unfinished_with_a_token, is_slow=True),
    Attack("http: connections that ask nothing", _many_connections, is_slow=True),
    Attack("http: requests sent ahead", _sent_ahead, is_slow=True),
    Attack("http: documents that nobody reads", _nobody_reads),
    Attack("http: 60 streams that nobody reads", _streams_that_nobody_reads),
]
_QUICK: Final = ("empty objects", "empty lists", "messages")


def _attacks(body: HostileBody) -> Iterator[Attack]:
    """With a body that is as large as it may be, one with as many entries as are let in, and one read in one piece."""
    for size, make, is_slow in (
        ("", lambda: body.make(_MAX_BODY_BYTES), body.name not in _QUICK),
        (", within bounds", lambda: body.make_within_bounds(_MAX_BODY_BYTES), body.name not in _QUICK),
        (", small", lambda: body.make(_SMALL_BYTES), True),
    ):
        yield Attack(f"http: {body.name}{size}", functools.partial(_send_body, body, functools.cache(make)), is_slow)


ATTACKS: list[Attack] = [*_CONNECTIONS, *(attack for body in _bodies() for attack in _attacks(body))]
