"""A server whose answers, and the times at which they come, are written down in a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

DONE = b"data: [DONE]\n\n"


class ScriptedClock:
    """The client's clock. It stands still until the script moves it on.

    The client reads the clock each time that it gets data, so a script knows when its last step has been seen.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self._was_read.set()
        return self._now_s

    def move_to(self, now_s: float) -> None:
        self._now_s = now_s
        self._was_read.clear()

    async def was_read(self) -> None:
        async with asyncio.timeout(60):
            await self._was_read.wait()


@dataclass(frozen=True)
class At:
    """Send data at a time."""

    now_s: float
    data: bytes


class HangUp:
    """Close the connection in the middle of the answer."""


class SayNothing:
    """Leave the client waiting."""


Step: TypeAlias = At | bytes | HangUp | SayNothing


@dataclass
class Answer:
    steps: Sequence[Step]
    status: int = 200


@dataclass
class ScriptedServer:
    """Answers each call of a path by the path's next answer, or again by its last one."""

    answers: dict[str, list[Answer]]
    clock: ScriptedClock
    url: str = ""
    bodies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer_call(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = lines[0].split()[1]
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        self.headers.append(headers)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if body:
            self.bodies.setdefault(path, []).append(json.loads(body))
        answers = self.answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % answer.status)
        for step in answer.steps:
            match step:
                case At(now_s, data):
                    self.clock.move_to(now_s)
                    writer.write(_chunk(data))
                    await self.clock.was_read()
                case bytes():
                    writer.write(_chunk(step))
                case HangUp():
                    raise ConnectionResetError
                case SayNothing():
                    await reader.read()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def scripted_server(
    answers: dict[str, list[Answer]], clock: ScriptedClock | None = None
) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(answers, clock or ScriptedClock())
    server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield scripted


def text_event(text: str, reason: str | None = None) -> bytes:
    """An event of /v1/completions."""
    return _event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None})


def chat_event(reason: str | None = None, **delta: str) -> bytes:
    """An event of /v1/chat/completions."""
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def usage_event(num_input: int, num_output: int) -> bytes:
    """The last event."""
    return _event({"choices": [], "usage": {"prompt_tokens": num_input, "completion_tokens": num_output}})


def models(name: str = "tiny", **fields: int) -> Answer:
    """An answer of /v1/models."""
    return Answer([json.dumps({"data": [{"id": "adapter", "parent": name}, {"id": name, **fields}]}).encode()])


def tokenized(num_tokens: int = 20) -> Answer:
    """An answer of /tokenize: words of two letters."""
    words = [f"Ġw{chr(97 + number)}" for number in range(num_tokens)]
    return Answer([json.dumps({"tokens": list(range(num_tokens)), "token_strs": words}).encode()])


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()
