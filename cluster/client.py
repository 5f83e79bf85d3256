"""A client of raypd.v1, for Python programs and for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # it ships no types

from cluster.errors import ClusterError
from cluster.ingress.protos.raypd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from cluster.ingress.statuses import STATUS_DETAILS_KEY

_CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
)

Prompt = str | Sequence[int] | Sequence[tuple[str, str]]
"""Text, token ids, or a conversation of (role, content)."""


class CallFailed(ClusterError):
    """A call to an ingress failed.

    code:          gRPC's
    violations:    what is wrong with the request, by field
    retry_delay_s: when to try again, if the ingress said so
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: dict[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.violations = violations or {}
        self.retry_delay_s = retry_delay_s


class GenerateClient:
    """Calls one ingress. Use it as an async context manager, on one event loop; generate_blocking() needs none."""

    def __init__(self, address: str) -> None:
        """address: host:port."""
        self.address = address

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self._model = model_pb2_grpc.ModelServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        output_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a prompt. Closing the generator, or cancelling its task, aborts the request.

        sampling: fields of raypd.v1.SamplingParams, such as max_tokens=64, temperature=0.0, stop=["\\n\\n"]
        Raises CallFailed; ValueError or TypeError for a field that does not exist or cannot hold its value.
        """
        message = generate_pb2.GenerateRequest(
            request_id=request_id,
            sampling_params=generate_pb2.SamplingParams(**sampling),
            output_token_ids=output_token_ids,
        )
        _set_prompt(message, prompt)
        async with aclosing(self.send(message, timeout_s)) as responses:
            async for response in responses:
                yield response

    async def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a request that is made already; otherwise as generate()."""
        call = self._generate.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error
        finally:
            call.cancel()

    async def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """Describe the served model. Raises CallFailed."""
        try:
            return await self._model.GetModel(model_pb2.GetModelRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error

    async def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Describe the cluster. Raises CallFailed."""
        try:
            return await self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error

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
        try:
            return list((await self._admin.Scale(request, timeout=timeout_s)).engine_ids)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error

    async def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """Take an engine out of service once its requests have ended or moved. Raises CallFailed."""
        request = admin_pb2.DrainRequest(engine_id=engine_id, for_good=for_good)
        try:
            await self._admin.Drain(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error

    async def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """Take everything on a node out of service; returns the ids of its engines. Raises CallFailed.

        node: its address or hostname, or the begin of Ray's id
        """
        try:
            response = await self._admin.DrainNode(admin_pb2.DrainNodeRequest(node=node), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error
        return list(response.engine_ids)

    async def update(self, model: str, timeout_s: float | None = None) -> int:
        """Replace the engines by ones that serve this checkpoint; returns its version. Raises CallFailed."""
        try:
            response = await self._admin.Update(admin_pb2.UpdateRequest(model=model), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error
        return response.model_version

    async def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """Let an engine serve as prefill, decode or both from now on. Raises CallFailed."""
        try:
            await self._admin.SetRole(admin_pb2.SetRoleRequest(engine_id=engine_id, role=role), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _call_failed(error) from error


def generate_blocking(
    address: str, prompt: Prompt, *, timeout_s: float | None = None, **sampling: Any
) -> Generator[generate_pb2.GenerateResponse, None, None]:
    """Stream the answer to a prompt, for programs without an event loop; otherwise as GenerateClient.generate."""

    async def connected() -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        async with (
            GenerateClient(address) as client,
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


def _call_failed(error: grpc.aio.AioRpcError) -> CallFailed:
    violations: dict[str, str] = {}
    retry_delay_s = None
    for detail in _details(error):
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations = {violation.field: violation.description for violation in bad_request.field_violations}
        elif detail.Unpack(retry_info):
            retry_delay_s = retry_info.retry_delay.ToMilliseconds() / 1000
    return CallFailed(error.code(), error.details() or "no message", violations, retry_delay_s)


def _details(error: grpc.aio.AioRpcError) -> Sequence[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            return list(status.details)
    return ()
