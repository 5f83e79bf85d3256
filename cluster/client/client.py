"""A client of raypd.v1, for Python programs and for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from cluster.client.errors import CallFailed as CallFailed
from cluster.client.errors import call_failed
from cluster.client.ingresses import Ingress, Ingresses, parse_addresses
from cluster.client.stream import stream_once, stream_resuming
from cluster.ingress.protos.raypd.v1 import admin_pb2, generate_pb2, model_pb2

_T = TypeVar("_T")

Prompt = str | Sequence[int] | Sequence[tuple[str, str]]
"""Text, token ids, or a conversation of (role, content)."""


class GenerateClient:
    """Calls a cluster by one or several of its ingresses; of several, those that do not answer are passed over.

    Use it as an async context manager, on one event loop; generate_blocking() needs none.
    """

    def __init__(self, addresses: str | Sequence[str], *, recovery_timeout_s: float = 60.0) -> None:
        """addresses: host:port each, several with commas between them or in a sequence; the first is called first

        recovery_timeout_s: how long a stream that was cut waits for an ingress to go on with it
        Raises ValueError if there is no address.
        """
        self._addresses = parse_addresses(addresses)
        self._recovery_timeout_s = recovery_timeout_s

    async def __aenter__(self) -> Self:
        self._ingresses = Ingresses(self._addresses)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._ingresses.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        output_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
        resume: bool = True,
        **sampling: Any,
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a prompt. Closing the generator, or cancelling its task, aborts the request.

        If its ingress goes away, the answer goes on at another one, or at this one when it is back, as if nothing had
        happened: text, tokens and log-probabilities come once and in order. What the last response says of timings and
        cached tokens is the last ingress's part.

        resume:    False: a stream that is cut raises CallFailed, and what to do then is the caller's affair
        timeout_s: for all of it
        sampling:  fields of raypd.v1.SamplingParams, such as max_tokens=64, temperature=0.0, stop=["\\n\\n"]
        Raises CallFailed; ValueError or TypeError for a field that does not exist or cannot hold its value.
        """
        message = generate_pb2.GenerateRequest(
            request_id=request_id,
            sampling_params=generate_pb2.SamplingParams(**sampling),
            output_token_ids=output_token_ids,
        )
        _set_prompt(message, prompt)
        async with aclosing(self.send(message, timeout_s, resume=resume)) as responses:
            async for response in responses:
                yield response

    async def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None, *, resume: bool = True
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a request that is made already; otherwise as generate()."""
        if resume:
            answer = stream_resuming(self._ingresses, request, timeout_s, self._recovery_timeout_s)
        else:
            answer = stream_once(await self._ingresses.find(timeout_s), request, timeout_s)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """Describe the served model. Raises CallFailed."""
        request = model_pb2.GetModelRequest()
        return await self._ask(lambda ingress: ingress.model.GetModel(request, timeout=timeout_s), timeout_s)

    async def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Describe the cluster. Raises CallFailed."""
        request = admin_pb2.GetStatusRequest()
        return await self._ask(lambda ingress: ingress.admin.GetStatus(request, timeout=timeout_s), timeout_s)

    async def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        both: int | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Want so many engines from now on; returns the ids of all that are wanted then. Raises CallFailed."""
        request = admin_pb2.ScaleRequest(prefill=prefill, decode=decode, both=both)
        response = await self._ask(lambda ingress: ingress.admin.Scale(request, timeout=timeout_s), timeout_s)
        return list(response.engine_ids)

    async def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """Take an engine out of service once its requests have ended or moved. Raises CallFailed."""
        request = admin_pb2.DrainRequest(engine_id=engine_id, for_good=for_good)
        await self._ask(lambda ingress: ingress.admin.Drain(request, timeout=timeout_s), timeout_s)

    async def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """Take everything on a node out of service; returns the ids of its engines. Raises CallFailed.

        node: its address or hostname, or the begin of Ray's id
        """
        request = admin_pb2.DrainNodeRequest(node=node)
        response = await self._ask(lambda ingress: ingress.admin.DrainNode(request, timeout=timeout_s), timeout_s)
        return list(response.engine_ids)

    async def update(self, model: str, timeout_s: float | None = None) -> int:
        """Replace the engines by ones that serve this checkpoint; returns its version. Raises CallFailed."""
        request = admin_pb2.UpdateRequest(model=model)
        response = await self._ask(lambda ingress: ingress.admin.Update(request, timeout=timeout_s), timeout_s)
        return response.model_version

    async def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """Let an engine serve as prefill, decode or both from now on. Raises CallFailed."""
        request = admin_pb2.SetRoleRequest(engine_id=engine_id, role=role)
        await self._ask(lambda ingress: ingress.admin.SetRole(request, timeout=timeout_s), timeout_s)

    async def _ask(self, call: Callable[[Ingress], Awaitable[_T]], timeout_s: float | None) -> _T:
        """Make a call of one answer, once: to the first ingress that can be connected to. Raises CallFailed."""
        ingress = await self._ingresses.find(timeout_s)
        try:
            return await call(ingress)
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from error


def generate_blocking(
    addresses: str | Sequence[str], prompt: Prompt, *, timeout_s: float | None = None, **sampling: Any
) -> Generator[generate_pb2.GenerateResponse, None, None]:
    """Stream the answer to a prompt, for programs without an event loop; otherwise as GenerateClient.generate."""

    async def connected() -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        async with (
            GenerateClient(addresses) as client,
            aclosing(client.generate(prompt, timeout_s=timeout_s, **sampling)) as responses,
        ):
            async for response in responses:
                yield response

    with asyncio.Runner() as runner:
        responses = connected()

        async def next_response() -> generate_pb2.GenerateResponse | None:
            return await anext(responses, None)

        try:
            while (response := runner.run(next_response())) is not None:
                yield response
        finally:
            runner.run(responses.aclose())


def _set_prompt(message: generate_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
        return
    message.token_ids.SetInParent()  # So that the server names an empty prompt; chat messages replace it.
    for item in prompt:
        if isinstance(item, tuple):
            role, content = item
            message.chat.messages.add(role=role, content=content)
        else:
            message.token_ids.ids.append(item)
