"""The HTTP server on loopback, on fake engines, and OpenAI's client at it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
import openai

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.access.access_control import AccessControl
from cluster.api.http.server import HttpServer
from cluster.observability.status import ClusterView, ControllerView
from cluster.parameters.json_types import JSON
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.serving import Serving
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.settings.http import HttpConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_tokenizer import ModelTokenizer
from tests.cluster.serving_setup import MODEL, Pair, make_pair, make_serving
from tests.fakes import byte_tokenizer


@dataclass
class Setup:
    """client: OpenAI's; http: for what that cannot say"""

    pair: Pair
    server: HttpServer
    port: int
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient

    async def answer(
        self, text: str, reason: FinishReason = FinishReason.STOP, *, stop: str = "\n"
    ) -> EngineCoreRequest:
        """Let the engines answer the next request; the last character ends it. Returns what D was asked."""
        producer, consumer = await self.pair.next_requests()
        self.pair.prefill.send(producer, 0, text[:1], end_cause=EndCause.HANDED_OVER)
        if reason is FinishReason.STOP:
            self.pair.decode.send(consumer, 1, text[1:] + stop, finish_reason=reason, stop_token_id=ord(stop))
        else:
            self.pair.decode.send(consumer, 1, text[1:], finish_reason=reason)
        return consumer


def template(messages: list[dict[str, JSON]], variables: dict[str, JSON]) -> str:
    """A chat template."""
    tools = f"[{len(variables['tools'])} tools]" if isinstance(variables.get("tools"), list) else ""  # type: ignore[arg-type]  # it is a list
    return tools + "".join(f"<{message['role']}>{message['content']}" for message in messages)


def chat_pair(pooling: PoolingFacts | None = None) -> Pair:
    """Fake engines of a model that chats, and maybe gives vectors."""
    pair = make_pair()
    model = dataclasses.replace(MODEL, pooling=pooling)
    processor = InputProcessor(model, ModelTokenizer(byte_tokenizer(), template, use_fastokens=True))
    versions = ModelVersions(ModelVersion(1, processor, LeastLoadedPair()))
    return Pair(pair.prefill, pair.decode, make_serving(pair.prefill, pair.decode, versions=versions))


def view_of(serving: Serving) -> Callable[[], Awaitable[ClusterView]]:
    """Return a function that views a cluster without a controller."""

    async def view() -> ClusterView:
        requests = serving.requests_in_flight()
        return ClusterView("tiny", time.time(), 7, (), requests, ControllerView(error="no controller"))

    return view


@asynccontextmanager
async def http_server(
    serving: Serving,
    config: HttpConfig | None = None,
    access: AccessControl | None = None,
    slow_reader_timeout_s: float = 60.0,
    allowed_hosts: Sequence[str] | None = None,
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A running server."""
    config = config or HttpConfig()
    config = config.model_copy(update={"port": 0})
    server = HttpServer(
        serving,
        view_of(serving),
        config,
        access=access,
        slow_reader_timeout_s=slow_reader_timeout_s,
        allowed_hosts=allowed_hosts,
        host="127.0.0.1",
    )
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.drain(0)


@asynccontextmanager
async def http_setup(
    config: HttpConfig | None = None,
    access: AccessControl | None = None,
    slow_reader_timeout_s: float = 60.0,
    pooling: PoolingFacts | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> AsyncIterator[Setup]:
    """A running server and its clients."""
    pair = chat_pair(pooling)
    async with http_server(pair.serving, config, access, slow_reader_timeout_s, allowed_hosts) as (server, port):
        url = f"http://127.0.0.1:{port}"
        # Looking for certificates takes longer than all the rest.
        async with httpx2.AsyncClient(base_url=url, verify=False, timeout=60) as http:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, http_client=http)
            yield Setup(pair, server, port, client, http)
