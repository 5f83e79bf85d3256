"""A client that does nothing wrong while others attack: what it feels is what they do to everybody.

It streams by gRPC and by HTTP without a pause, and makes short calls by both, each on a new connection, as others do
who come just then. It lives in a process of its own, so that what attackers compute does not keep it from reading.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import grpc
import grpc.aio

from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc, model_pb2, model_pb2_grpc
from cluster.client import Credentials
from cluster.client.channel import open_channel

_NUM_TOKENS: Final = 3000
_CALL_INTERVAL_S: Final = 0.05
_TIMEOUT_S: Final = 60.0
_MAX_ERRORS: Final = 20


@dataclass(slots=True)
class Felt:
    """The troubles of the victim since the last report.

    errors:     of calls and streams, the first few
    num_calls:  that were answered; num_messages: of streams
    longest_gap_s, longest_call_s: by API, in seconds; of streams and of short calls
    """

    errors: list[str] = field(default_factory=list)
    num_calls: int = 0
    num_messages: int = 0
    longest_gap_s: dict[str, float] = field(default_factory=dict)
    longest_call_s: dict[str, float] = field(default_factory=dict)

    def and_then(self, later: Felt) -> Felt:
        """Return the troubles of both times together."""
        return Felt(
            [*self.errors, *later.errors][:_MAX_ERRORS],
            self.num_calls + later.num_calls,
            self.num_messages + later.num_messages,
            _largest(self.longest_gap_s, later.longest_gap_s),
            _largest(self.longest_call_s, later.longest_call_s),
        )

    def on_message(self, api: str, gap_s: float) -> None:
        self.num_messages += 1
        self.longest_gap_s[api] = max(gap_s, self.longest_gap_s.get(api, 0.0))

    def on_answer(self, api: str, took_s: float) -> None:
        self.num_calls += 1
        self.longest_call_s[api] = max(took_s, self.longest_call_s.get(api, 0.0))

    def on_error(self, what: str) -> None:
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(what)


def _largest(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {api: max(first.get(api, 0.0), second.get(api, 0.0)) for api in first | second}


def visit(pipe: Connection, grpc_address: str, http_port: int, credentials: Credentials) -> None:
    """Stream and call until the pipe is closed. It is sent True once all goes well, then a Felt for each message."""
    asyncio.run(_Victim(grpc_address, http_port, credentials).run(pipe))


class _Victim:
    def __init__(self, grpc_address: str, http_port: int, credentials: Credentials) -> None:
        self._grpc_address = grpc_address
        self._http_port = http_port
        self._credentials = credentials
        self._tls = None if credentials.ca is None else ssl.create_default_context(cafile=credentials.ca)
        self._felt = Felt()
        self._last_message_s: dict[str, float] = {}

    async def run(self, pipe: Connection) -> None:
        activities: dict[str, Callable[[], Awaitable[None]]] = {
            "gRPC stream": self._stream_by_grpc,
            "HTTP stream": self._stream_by_http,
            "gRPC call": self._call_by_grpc,
            "HTTP call": self._call_by_http,
        }
        tasks = [asyncio.create_task(self._repeat(name, act)) for name, act in activities.items()]
        while len(self._felt.longest_gap_s) < 2 or len(self._felt.longest_call_s) < 2:  # noqa: ASYNC110  # a process of its own
            await asyncio.sleep(_CALL_INTERVAL_S)
        pipe.send(True)
        is_over, loop = asyncio.Event(), asyncio.get_running_loop()

        def answer() -> None:
            try:
                while pipe.recv():
                    loop.call_soon_threadsafe(self._report, pipe)
            except EOFError:
                pass
            loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=answer, daemon=True).start()
        await is_over.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, pipe: Connection) -> None:
        felt, self._felt = self._felt, Felt()
        # A stream that stands still has a gap already, whenever it ends.
        for api, last_s in self._last_message_s.items():
            felt.on_message(api, time.monotonic() - last_s)
        pipe.send(felt)

    async def _repeat(self, name: str, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S if name.endswith("call") else None):
                    await act()
            except (grpc.RpcError, OSError, EOFError, ValueError, TimeoutError) as error:
                self._felt.on_error(f"{name}: {error!r}"[:500])
            await asyncio.sleep(_CALL_INTERVAL_S)

    async def _stream_by_grpc(self) -> None:
        async with open_channel(self._grpc_address, self._credentials) as channel:
            sampling = generate_pb2.SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
            request = generate_pb2.GenerateRequest(text="victim", sampling_params=sampling)
            self._last_message_s["gRPC"] = time.monotonic()
            async for _ in generate_pb2_grpc.GenerateServiceStub(channel).Generate(request):
                self._on_message("gRPC")

    async def _stream_by_http(self) -> None:
        asked = {"prompt": "victim", "max_tokens": _NUM_TOKENS, "ignore_eos": True, "stream": True}
        self._last_message_s["HTTP"] = time.monotonic()
        async with aclosing(self._http("POST", "/v1/completions", json.dumps(asked).encode())) as lines:
            async for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    self._on_message("HTTP")
        raise EOFError("the stream has no end")

    def _on_message(self, api: str) -> None:
        now_s = time.monotonic()
        self._felt.on_message(api, now_s - self._last_message_s[api])
        self._last_message_s[api] = now_s

    async def _call_by_grpc(self) -> None:
        began_s = time.monotonic()
        async with open_channel(self._grpc_address, self._credentials) as channel:
            answer = await model_pb2_grpc.ModelServiceStub(channel).Tokenize(model_pb2.TokenizeRequest(text="hello"))
        if not answer.token_ids:
            raise ValueError("no tokens")
        self._felt.on_answer("gRPC", time.monotonic() - began_s)

    async def _call_by_http(self) -> None:
        began_s = time.monotonic()
        async with aclosing(self._http("POST", "/tokenize", b'{"prompt": "hello"}')) as lines:
            body = b"".join([line async for line in lines])
        if not json.loads(body)["tokens"]:
            raise ValueError("no tokens")
        self._felt.on_answer("HTTP", time.monotonic() - began_s)

    async def _http(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer's body, with what frames its chunks. Raises ValueError if it is not 200."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port, ssl=self._tls)
        try:
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._http_port}\r\nconnection: close\r\n"
                f"authorization: Bearer {self._credentials.token}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"answered {status!r} {await reader.read(1000)!r}")
            while (await reader.readline()).strip():
                pass
            while line := await reader.readline():
                yield line
        finally:
            writer.close()
