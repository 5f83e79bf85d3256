"""The interceptor that every call goes through, whichever service it is for.

Its steps are, in this order: it checks the token and what its caller may do; it receives the request's message
(receiving.py); it refuses the call if the ingress is draining; it calls the service, and converts the error that the
service raises into a status with details. Writes are watched for slow readers (slow_readers.py), those of single
answers as well. An answer that is much larger than its request is made only when its caller has few others that it has
not read.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from cluster.access.access_control import AccessControl
from cluster.access.caller import current_caller, set_caller
from cluster.access.trace_context import HEADER as TRACEPARENT
from cluster.access.trace_context import parse_traceparent, set_trace_context
from cluster.api.grpc.conversions.statuses import ErrorStatus, internal_error, status_of
from cluster.api.grpc.receiving import MAX_OPEN_AT_ONCE, OPEN_TIMEOUT_S, Receiving
from cluster.api.grpc.sender_turns import SenderTurns
from cluster.api.grpc.slow_readers import SlowReaders
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.errors import ClusterError, InvalidRequest, PermissionDenied, Unauthenticated

logger = logging.getLogger(__name__)

ADMIN_SERVICE: Final = "raypd.v1.AdminService"
_REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_OPEN_SERVICES: Final = ("grpc.health.v1.Health", _REFLECTION)
"""Services that need no token: probes have none, and reflection tells nothing that is not public."""

_LARGE_ANSWERS: Final = frozenset({"/raypd.v1.GenerateService/Explain"})
"""Methods whose answers are much larger than their requests."""
MAX_LARGE_ANSWERS: Final = 4
"""The most of these answers that wait to be read by one token, or by one host where there are no tokens."""

_LAST_WORD_S: Final = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]
_Receive = Callable[[_Context], Awaitable[Any]]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor of one server. It belongs to one event loop."""

    def __init__(self, access: AccessControl, in_progress: CallsInProgress, slow_readers: SlowReaders) -> None:
        self._access = access
        self._in_progress = in_progress
        self._slow_readers = slow_readers
        self._receiving = Receiving()
        self._receiving_open = Receiving(MAX_OPEN_AT_ONCE, OPEN_TIMEOUT_S)
        self._large_answers = SenderTurns(MAX_LARGE_ANSWERS)
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
        if service not in _OPEN_SERVICES:
            try:
                caller = self._access.authenticate(_metadata(handler_call_details, "authorization"))
                if service == ADMIN_SERVICE:
                    caller.check_administers()
            except (Unauthenticated, PermissionDenied) as error:
                return _refusing(status_of(error))
            # This code already runs in the call's own task, so the context variables are set for this call alone.
            set_caller(caller)
            set_trace_context(parse_traceparent(_metadata(handler_call_details, TRACEPARENT)))
        wrapped = self._handlers.get(method)
        if wrapped is None:
            wrapped = self._handlers[method] = self._wrap(handler, method, service)
        return wrapped

    def _wrap(self, handler: Any, method: str, service: str) -> Any:
        """Return a handler that receives its message and writes its answers itself.

        For gRPC that is a method with a stream of requests and one of responses.
        """
        if service == _REFLECTION:
            behavior = self._reflecting(handler)
        else:
            receive = self._open_receiver(handler) if service in _OPEN_SERVICES else self._receiver(handler, method)
            # Operators and probes need to see a cluster that drains.
            is_always_in = service == ADMIN_SERVICE or service in _OPEN_SERVICES
            inside: AbstractAsyncContextManager[Any] = nullcontext() if is_always_in else self._in_progress
            behavior = handler.unary_stream if handler.response_streaming else _writing(handler.unary_unary)
            if service not in _OPEN_SERVICES:
                behavior = self._slow_readers.watching(behavior)
            if method in _LARGE_ANSWERS:
                behavior = self._one_of_few(behavior)
            behavior = _answering(behavior, inside, receive)
        return grpc.stream_stream_rpc_method_handler(behavior, None, handler.response_serializer)

    def _one_of_few(self, behavior: Callable[[Any, _Context], Awaitable[None]]) -> Callable[[Any, _Context], Any]:
        async def in_turn(request: Any, context: _Context) -> None:
            async with self._large_answers.turn(current_caller().name or _host(context)):
                await behavior(request, context)

        return in_turn

    def _receiver(self, handler: Any, method: str) -> _Receive:
        descriptor = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", ".")).input_type

        async def receive(context: _Context) -> Any:
            # Where callers have no names, the limits hold for each connection.
            sender = current_caller().name or context.peer()
            return await self._receiving.receive(sender, context, descriptor, handler.request_deserializer)

        return receive

    def _open_receiver(self, handler: Any) -> _Receive:
        async def receive(context: _Context) -> Any:
            return await self._receiving_open.receive_small(_host(context), context, handler.request_deserializer)

        return receive

    def _reflecting(self, handler: Any) -> Callable[[Any, _Context], Awaitable[None]]:
        async def reflect(requests: Any, context: _Context) -> None:
            del requests
            sender = f"reflection {_host(context)}"
            messages = self._receiving_open.receive_all_small(sender, context, handler.request_deserializer)
            try:
                async for response in handler.stream_stream(messages, context):
                    await context.write(response)
            except InvalidRequest as error:
                status = status_of(error)
            else:
                return
            # This await is outside of the except clause, because gRPC keeps the exception of an abort, and that
            # exception would otherwise keep the message in memory.
            await _abort(context, status)

        return reflect


def _writing(behavior: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[[Any, _Context], Awaitable[None]]:
    """Return the behavior of a method with a single answer, which ends once the answer has been written."""

    async def write(request: Any, context: _Context) -> None:
        await context.write(await behavior(request, context))

    return write


def _answering(
    behavior: Callable[[Any, _Context], Awaitable[Any]], inside: AbstractAsyncContextManager[Any], receive: _Receive
) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def answer(requests: Any, context: _Context) -> Any:
        del requests
        request = None
        try:
            request = await receive(context)
            async with inside:
                return await behavior(request, context)
        except ClusterError as error:
            status = status_of(error)
        except (grpc.aio.BaseError, grpc.RpcError):
            raise  # The call itself has ended: no status can be sent.
        except Exception:
            call_id = getattr(request, "request_id", "") or uuid.uuid4().hex
            logger.exception("a call failed by a bug", extra={"request_id": call_id})
            status = internal_error(call_id)
        # gRPC's context keeps the exception of an abort, and with it this frame, until the next full collection.
        request = None
        return await _abort(context, status)

    return answer


def _refusing(status: ErrorStatus) -> Any:
    """Return a handler that refuses the call without receiving its message."""

    async def refuse(requests: Any, context: _Context) -> NoReturn:
        del requests
        await _abort(context, status)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _host(context: _Context) -> str:
    """Return the address of the other end, without its port."""
    return context.peer().rpartition(":")[0]


def _metadata(details: grpc.HandlerCallDetails, name: str) -> str | bytes | None:
    """Return the first value of a key; gRPC's keys are lower case."""
    return next((value for key, value in details.invocation_metadata if key == name), None)


async def _abort(context: _Context, status: ErrorStatus) -> NoReturn:
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            await context.abort(status.code, status.message, status.trailing_metadata)
    except TimeoutError:
        # The client has not read the responses before the status. gRPC keeps them until the client reads or hangs up.
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")
