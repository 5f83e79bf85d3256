"""The HTTP APIs of a soak, and their clients: OpenAI's client, which does not resume what a restart cuts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import httpx2
import openai

from cluster.api.http.server import HttpServer
from cluster.requests.serving import Serving
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import view_of

_KEEP_ALIVE_INTERVAL_S: Final = 0.01
"""So short that streams have comments in them."""
_CUT: Final = (openai.APIError, httpx2.HTTPError)


class HttpServers:
    """One for each ingress."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._servers: list[HttpServer] = []
        self._ports: list[int] = []

    async def open(self) -> None:
        """Open one more."""
        server = self._server(port=0)
        self._ports.append(await server.start())
        self._servers.append(server)

    async def restart(self, number: int) -> None:
        """Cut off whoever is at one, and open it again at its port."""
        await self._servers[number].drain(grace_s=0)
        self._servers[number] = self._server(self._ports[number])
        await self._servers[number].start()

    async def close(self) -> None:
        """Close all."""
        for server in self._servers:
            await server.drain(grace_s=0)

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[list[openai.AsyncOpenAI]]:
        """Yield a client for each server."""
        async with AsyncExitStack() as stack:
            clients = []
            for port in self._ports:
                http = await stack.enter_async_context(httpx2.AsyncClient(verify=False, timeout=60.0))
                url = f"http://127.0.0.1:{port}/v1"
                clients.append(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http))
            yield clients

    def _server(self, port: int) -> HttpServer:
        config = HttpConfig(port=port, keep_alive_interval_s=_KEEP_ALIVE_INTERVAL_S)
        return HttpServer(self._serving, view_of(self._serving), config, slow_reader_timeout_s=60.0, host="127.0.0.1")


async def http_visit(
    client: openai.AsyncOpenAI, prompt: list[int], expected: Sequence[int], kind: str, rng: random.Random
) -> str:
    """Ask, and check the tokens. kind: read, read slowly or left; returns what became of it."""
    asked: dict[str, Any] = {"model": "", "prompt": prompt, "max_tokens": len(expected), "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True, "timeout": 60}
    token_ids: list[int] = []
    leaves_after = rng.randrange(len(expected)) if kind == "left" else len(expected)
    try:
        if kind == "read" and rng.random() < 0.5:
            whole = await client.completions.create(extra_body=extra, **asked)
            assert whole.choices[0].model_extra is not None
            assert whole.choices[0].model_extra["token_ids"] == list(expected)
            return "http read whole"
        async with await client.completions.create(stream=True, extra_body=extra, **asked) as stream:
            async for chunk in stream:
                token_ids += (chunk.choices[0].model_extra or {})["token_ids"]
                if len(token_ids) > leaves_after:
                    break
                if kind == "read slowly":
                    await asyncio.sleep(rng.uniform(0.0, 0.05))
    except _CUT:
        return "http cut"
    finally:
        assert token_ids == list(expected[: len(token_ids)])
    assert kind == "left" or len(token_ids) == len(expected)
    return f"http {kind}"
