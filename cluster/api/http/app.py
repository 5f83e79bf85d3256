"""The ASGI application: its routes, and the checks that every call passes before it is worked on."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.access.access_control import AccessControl
from cluster.access.caller import Caller, calling_as
from cluster.access.trace_context import HEADER as TRACEPARENT
from cluster.access.trace_context import parse_traceparent, traced_as
from cluster.api.http.errors import error_of, internal_error, refused
from cluster.api.http.receiving.authentication import Authentication, EveryAnswer, caller_of
from cluster.api.http.receiving.body_budget import BodyBudget
from cluster.api.http.receiving.body_limits import Refused, check_body_headers, receive_body
from cluster.api.http.receiving.hosts import AllowedHosts, HostCheck
from cluster.api.http.receiving.reading import BodyT, is_large, read_body
from cluster.api.http.requests import MAX_TIMEOUT_S, TIMEOUT_HEADER
from cluster.api.http.streams import ABORT, unless_client_leaves
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.errors import ClusterError, Draining, FieldViolation, InvalidRequest
from cluster.settings.http import HttpConfig

logger = logging.getLogger(__name__)

_ERROR_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


class Call:
    """One HTTP call, whose body was received."""

    def __init__(self, request: Request, body: list[bytes], state: ServerState, arrived_s: float) -> None:
        """Keep the call. body: the parts of its body; arrived_s: when it arrived, on the event loop's clock"""
        self.request = request
        self._body = body
        self._state = state
        self._arrived_s = arrived_s

    async def read(self, kind: type[BodyT]) -> BodyT:
        """Parse and return the body; the bytes are dropped, so that this can be done once. Raises InvalidRequest."""
        body, self._body = self._body, []
        if not is_large(sum(map(len, body))):
            return await read_body(kind, _joined(body))
        # One large body is parsed at a time, because its objects take more memory than its bytes.
        async with self._state.reading:
            return await read_body(kind, _joined(body))

    def time_left_s(self, timeout_s: float | None) -> float | None:
        """Return how many seconds are left of the timeout in the body or in the header, whichever is less; or None.

        timeout_s: the timeout in the body. Raises InvalidRequest if the header is wrong.
        """
        given = [one for one in (timeout_s, _timeout_in(self.request.headers)) if one is not None]
        if not given:
            return None
        return max(0.0, self._arrived_s + min(given) - asyncio.get_running_loop().time())


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


class Endpoint:
    """An ASGI application around one handler. A client that hangs up cancels the handler, which aborts its requests.

    Before the body is received, the call is checked: whether the ingress drains, the body's type and length by its
    headers, and the limits of its caller.
    """

    def __init__(self, handler: Handler, state: ServerState, *, has_body: bool = False, is_work: bool = True) -> None:
        """Wrap a handler.

        has_body: whether calls have a body, and count against the caller's limits
        is_work:  whether a server that drains refuses new calls, and waits for the ones that have begun
        """
        self._handler = handler
        self._state = state
        self._has_body = has_body
        self._in_progress: AbstractAsyncContextManager[object] = state.in_progress if is_work else nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        try:
            await self._answered(Request(scope, receive), caller_of(scope), receive, send)
        except asyncio.CancelledError:
            if not self._state.in_progress.is_closed:
                raise
            # uvicorn cancels the calls that are left at the end of a drain, and would log a traceback for each of them.
            scope[ABORT]()
            await asyncio.sleep(0)

    async def _answered(self, request: Request, caller: Caller, receive: Receive, send: Send) -> None:
        arrived_s = asyncio.get_running_loop().time()
        with self._state.bodies.share(caller.name) as share:

            def sent(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start":
                    share.release()
                return send(message)

            try:
                if self._has_body:
                    caller = self._admitted(request, caller)
                # The bodies of other calls are ignored.
                body = await receive_body(request, share, self._state.config) if self._has_body else []
            except ClientDisconnect:
                return
            except Refused as error:
                await error.error.response()(request.scope, receive, sent)
                return
            except ClusterError as error:
                await error_of(error).response()(request.scope, receive, sent)
                return
            call = Call(request, body, self._state, arrived_s)
            del body  # The call frees it when it has been parsed.

            async def answer() -> None:
                await self._answer(call, caller, receive, sent)

            await unless_client_leaves(receive, answer)

    def _admitted(self, request: Request, caller: Caller) -> Caller:
        """Check a call by its headers, and count it against its caller's limits; returns the caller.

        Raises Refused, Draining, AllowanceSpent.
        """
        if self._state.in_progress.is_closed:
            raise Draining
        check_body_headers(request.headers, self._state.config)
        return replace(caller, allowance=caller.allowance.paid_ahead())

    async def _answer(self, call: Call, caller: Caller, receive: Receive, send: Send) -> None:
        request = call.request
        try:
            async with self._in_progress:
                trace = parse_traceparent(request.headers.get(TRACEPARENT))
                with calling_as(caller), traced_as(trace):
                    response = await self._handled(call)
                    await response(request.scope, receive, send)
        except ClusterError as error:
            await error_of(error).response()(request.scope, receive, send)

    async def _handled(self, call: Call) -> Response:
        try:
            return await self._handler(call)
        except ClusterError as error:
            return error_of(error).response()
        except Exception:
            request_id = uuid.uuid4().hex
            path = call.request.url.path
            logger.exception("a request failed by a bug", extra={"request_id": request_id, "path": path})
            return internal_error(request_id).response()


class ServerState:
    """The state that all endpoints share. It belongs to one event loop."""

    def __init__(self, in_progress: CallsInProgress, config: HttpConfig) -> None:
        self.in_progress = in_progress
        self.config = config
        self.bodies = BodyBudget(config.max_bodies_mib << 20)
        self.reading = asyncio.Lock()


def _joined(parts: list[bytes]) -> bytes:
    """Join the parts of a body; the list is emptied, so that they are freed."""
    whole = b"".join(parts)
    parts.clear()
    return whole


def _timeout_in(headers: Headers) -> float | None:
    """Return the timeout in the headers, in seconds; None if there is none. Raises InvalidRequest."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    with suppress(ValueError):
        if 0 < (timeout_s := float(text)) <= MAX_TIMEOUT_S:
            return timeout_s
    allowed = f"seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}"
    raise InvalidRequest(FieldViolation(TIMEOUT_HEADER, reprlib.repr(text), allowed))


@dataclass(frozen=True, slots=True)
class Guards:
    """The checks that a call passes before it is routed.

    access:          the tokens, and what their callers may do
    hosts:           the hosts that calls may name as their destination
    open_paths:      paths that need no token
    probed_paths:    paths that are answered whatever host a call names
    allowed_origins: origins of web pages from which browsers may call, and read the answers
    """

    access: AccessControl
    hosts: AllowedHosts
    open_paths: frozenset[str]
    probed_paths: frozenset[str]
    allowed_origins: Sequence[str] = ()


def make_app(routes: list[Route], guards: Guards, on_answer: Callable[[str, int], None]) -> Starlette:
    """Make the application. Calls without a route are answered by errors in the API's shape too.

    on_answer: is called with each answer's route ("" if it has none) and status
    """
    paths = frozenset(route.path for route in routes)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = refused(error.status_code, message, _ERROR_CODES.get(error.status_code, "refused")).response()
        response.headers.update(error.headers or {})
        return response

    def count(scope: Scope, status: int) -> None:
        # Answers are counted by their routes, which are few: a client can make up any number of paths.
        route, path = scope.get("route"), scope["path"]
        on_answer(route.path if isinstance(route, Route) else path if path in paths else "", status)

    middleware = [
        Middleware(EveryAnswer, count),
        Middleware(HostCheck, guards.hosts, guards.probed_paths),
        *([_cors(guards.allowed_origins)] if guards.allowed_origins else []),
        Middleware(Authentication, guards.access, guards.open_paths),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: on_http_error})


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # OpenAI's client adds headers of its own, and more with every version.
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )
