"""What clients can send by HTTP to take an ingress down, or others' answers away.

Bodies are as large as max_body_bytes lets them be, or as small as what is read in one piece; both sizes were enough.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tests.attacks.target import Attack, Target

_MAX_BODY_BYTES: Final = 16 * 2**20 - 200
_SMALL_BYTES: Final = 2**18 - 200
_TIMEOUT_S: Final = 30.0
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
        num = max(1, (size - len(self.before) - len(self.after)) // len(self.entry))
        return self.before + (self.entry * num).rstrip(b",") + self.after


def _bodies() -> list[HostileBody]:
    chat, completions, embeddings = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    message = b'"messages": [{"role": "user", "content": "hi"}]'
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
        HostileBody("numbers with fractions", completions, b'{"prompt": [', b"1.5,", b"1.5]}"),
        HostileBody("messages", chat, b'{"messages": [', b'{"role":""},', b"]}", answered),
        HostileBody("messages that are wrong", chat, b'{"messages": [', b'{"rule":""},', b"]}"),
        HostileBody(
            "parts", chat, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""},', b"]}]}", answered
        ),
        HostileBody("parts of no kind", chat, b'{"messages":[{"role":"user","content":[', b"{},", b"]}]}"),
        HostileBody(
            "images",
            chat,
            b'{"messages":[{"role":"user","content":[',
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
            "objects in a variable", chat, b"{" + message + b',"chat_template_kwargs":{"a":[', b'{"b":1},', b"]}}"
        ),
        HostileBody(
            "arguments",
            chat,
            b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\\"a\\":[',
            b"{},",
            b']}"}}]}]}',
            answered,
        ),
        HostileBody(
            "tool calls",
            chat,
            b'{"messages":[{"role":"assistant","tool_calls":[',
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
        HostileBody("a long number", completions, b'{"prompt":"a","n":1', b"0", b"}"),
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


_BIAS: Final = "{{{}}}".format(",".join(f'"{token}":1' for token in range(1 << 20)))


async def _send_body(body: HostileBody, size: int, target: Target) -> None:
    """Some of them one after the other, then some at once."""
    data = body.make(size)
    for num_at_once in (1, 1, 4 if size > _SMALL_BYTES else _NUM_AT_ONCE):
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
    """What comes until the server ends the connection, or nothing more comes."""
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
        answer = b""
        try:
            with suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            with suppress(ConnectionError):
                while part := await reader.read(65_536):
                    answer += part
        finally:
            writer.close()
        return answer


ATTACKS: list[Attack] = [
    *(
        Attack(f"http: {body.name}", functools.partial(_send_body, body, _MAX_BODY_BYTES), is_slow=True)
        for body in _bodies()
    ),
    *(
        Attack(f"http: {body.name}, small", functools.partial(_send_body, body, _SMALL_BYTES), is_slow=True)
        for body in _bodies()
    ),
]
