"""What every call goes through, whichever service it is for: a service that is added later is covered too.

In this order: who calls, and may they (before the request's message is read); is the ingress draining; then the service
itself; what it raises becomes a status with its details. Watch over slow readers is kept of every stream.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.access.caller import set_caller
from cluster.access.control import AccessControl
from cluster.errors import ClusterError, FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated
from cluster.ingress.gate import Gate
from cluster.ingress.slow_readers import SlowReaders
from cluster.ingress.statuses import ErrorStatus, internal_error, status_of

logger = logging.getLogger(__name__)

ADMIN_SERVICE: Final = "raypd.v1.AdminService"
_OPEN_SERVICES: Final = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
"""Probes have no token, and what reflection tells is in the repository."""

_LAST_WORD_S: Final = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """One of each server."""

    def __init__(self, access: AccessControl, gate: Gate, slow_readers: SlowReaders) -> None:
        self._access = access
        self._gate = gate
        self._slow_readers = slow_readers
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the method's handler, or one that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        service = method.rpartition("/")[0].removeprefix("/")
        if service in _OPEN_SERVICES:
            return handler
        try:
            caller = self._access.authenticate(_authorization(handler_call_details))
            if service == ADMIN_SERVICE:
                caller.check_administers()
        except (Unauthenticated, PermissionDenied) as error:
            return _refusing(handler, status_of(error))
        # gRPC has a task for each call, and this runs in it already.
        set_caller(caller)
        wrapped = self._handlers.get(method)
        if wrapped is None:
            wrapped = self._handlers[method] = self._wrap(handler, service)
        return wrapped

    def _wrap(self, handler: Any, service: str) -> Any:
        # Who administers a cluster wants to see it drain.
        inside: AbstractAsyncContextManager[Any] = nullcontext() if service == ADMIN_SERVICE else self._gate
        if not handler.response_streaming:
            behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
            return _with_behavior(handler, _answering(behavior, inside))
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if inspect.isasyncgenfunction(behavior):
            behavior = _written(behavior)
        return _with_behavior(handler, _answering(self._slow_readers.watching(behavior), inside))


def _answering(
    behavior: Callable[[Any, _Context], Awaitable[Any]], inside: AbstractAsyncContextManager[Any]
) -> Callable[[Any, _Context], Awaitable[Any]]:
    @functools.wraps(behavior)
    async def answer(request: Any, context: _Context) -> Any:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async with inside:
                return await behavior(request, context)
        except ClusterError as error:
            status = status_of(error)
        except (grpc.aio.BaseError, grpc.RpcError):
            raise  # The call itself is over: nobody is left to be told.
        except Exception:
            call_id = getattr(request, "request_id", "") or uuid.uuid4().hex
            logger.exception("a call failed by a bug", extra={"request_id": call_id})
            status = internal_error(call_id)
        return await _abort(context, status)

    return answer


def _written(behavior: Callable[[Any, _Context], AsyncIterator[Any]]) -> Callable[[Any, _Context], Awaitable[None]]:
    """A generator as a coroutine that writes."""

    async def write_all(request: Any, context: _Context) -> None:
        async for response in behavior(request, context):
            await context.write(response)

    return write_all


def _refusing(handler: Any, status: ErrorStatus) -> Any:
    """A handler of the same kind that reads nothing."""

    async def refuse(request: Any, context: _Context) -> NoReturn:
        del request
        await _abort(context, status)

    return _KIND_OF[handler.request_streaming, handler.response_streaming](refuse)


def _with_behavior(handler: Any, behavior: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
    kind = _KIND_OF[handler.request_streaming, handler.response_streaming]
    deserializer = handler.request_deserializer
    if deserializer is not None and not handler.request_streaming:
        deserializer = functools.partial(_deserialize, deserializer)
    return kind(behavior, deserializer, handler.response_serializer)


def _deserialize(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    """gRPC would take an error here for one of ours."""
    try:
        return deserializer(data)
    except DecodeError as error:
        violation = FieldViolation("request", f"{len(data)} bytes", f"a message of the method's type, UTF-8 ({error})")
        return InvalidRequest(violation)


_KIND_OF: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _authorization(details: grpc.HandlerCallDetails) -> str | bytes | None:
    return next((value for key, value in details.invocation_metadata if key == "authorization"), None)


async def _abort(context: _Context, status: ErrorStatus) -> NoReturn:
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            await context.abort(status.code, status.message, status.trailing_metadata)
    except TimeoutError:
        # It is behind what the client has not read. gRPC keeps it until the client does, or hangs up.
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")
