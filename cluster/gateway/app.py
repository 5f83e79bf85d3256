"""The ASGI application: routes, and what every call goes through before it is worked on."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.access.caller import ANYBODY, calling_as
from cluster.access.control import AccessControl
from cluster.errors import ClusterError, FieldViolation, InvalidRequest
from cluster.gateway.config import HttpConfig
from cluster.gateway.errors import HttpError, error_of, internal_error, malformed, refused
from cluster.gateway.requests import MAX_TIMEOUT_S, TIMEOUT_HEADER, Body
from cluster.gateway.streams import ABORT, unless_client_leaves
from cluster.ingress.gate import Gate

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=Body)

_ERROR_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, received. arrived_s: on the event loop's clock"""

    request: Request
    body: bytes
    arrived_s: float

    def read(self, kind: type[BodyT]) -> BodyT:
        """Its body. Raises InvalidRequest."""
        try:
            return kind.model_validate_json(self.body or b"{}")
        except ValidationError as error:
            raise malformed(error) from error

    def time_left_s(self, timeout_s: float | None) -> float | None:
        """What is left of the time that its client gives it, by its body or its header, whichever is less.

        timeout_s: by its body. Raises InvalidRequest.
        """
        given = [one for one in (timeout_s, _timeout_in(self.request.headers)) if one is not None]
        if not given:
            return None
        return max(0.0, self.arrived_s + min(given) - asyncio.get_running_loop().time())


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


class Refused(Exception):
    """A call that is over before it is understood."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.detail.message)
        self.error = error


class Endpoint:
    """An ASGI application around one handler. A client that hangs up cancels it, and so aborts its requests."""

    def __init__(self, handler: Handler, door: Door, *, needs_token: bool = True, is_work: bool = True) -> None:
        """is_work: refused, and waited for, when the door closes"""
        self._handler = handler
        self._door = door
        self._needs_token = needs_token
        self._gate: AbstractAsyncContextManager[object] = door.gate if is_work else nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        arrived_s = asyncio.get_running_loop().time()
        request = Request(scope, receive)

        def counted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._door.on_answer(_path_of(request), message["status"])
            return send(message)

        try:
            body = await self._door.receive(request)
        except ClientDisconnect:
            return
        except Refused as error:
            await error.error.response()(scope, receive, counted)
            return

        async def answer() -> None:
            await self._answer(Call(request, body, arrived_s), receive, counted)

        try:
            await unless_client_leaves(receive, answer)
        except asyncio.CancelledError:
            if not self._door.gate.is_closed:
                raise
            # uvicorn ends like this what a drain has not waited for, and would log a traceback of each.
            scope[ABORT]()
            await asyncio.sleep(0)

    async def _answer(self, call: Call, receive: Receive, send: Send) -> None:
        request = call.request
        try:
            caller = self._door.access.authenticate(request.headers.get("authorization")) if self._needs_token else None
            async with self._gate:
                with calling_as(caller or ANYBODY):
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


@dataclass(frozen=True, slots=True)
class Door:
    """What all endpoints share."""

    access: AccessControl
    gate: Gate
    config: HttpConfig
    on_answer: Callable[[str, int], None]
    """Told each answer's route and status."""

    async def receive(self, request: Request) -> bytes:
        """A call's whole body. Raises Refused, ClientDisconnect."""
        limit = self.config.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.receive_timeout_s):
                async for data in request.stream():
                    body += data
                    if len(body) > limit:
                        raise Refused(refused(413, f"the body has more than {limit} bytes", "body_too_large"))
        except TimeoutError as error:
            message = f"the body did not come within {self.config.receive_timeout_s:g} s"
            raise Refused(refused(408, message, "timeout")) from error
        return bytes(body)


def _timeout_in(headers: Headers) -> float | None:
    """Raises InvalidRequest."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    with suppress(ValueError):
        if 0 < (timeout_s := float(text)) <= MAX_TIMEOUT_S:
            return timeout_s
    allowed = f"seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}"
    raise InvalidRequest(FieldViolation(TIMEOUT_HEADER, reprlib.repr(text), allowed))


def _path_of(request: Request) -> str:
    """The route, of which there are few: paths are what clients make them."""
    route = request.scope.get("route")
    return route.path if isinstance(route, Route) else ""


def make_app(routes: list[Route], allowed_origins: Sequence[str] = ()) -> Starlette:
    """The application. What is no call of the API is an error in its shape, too.

    allowed_origins: of web pages whose browsers may call it, and read its answers
    """

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = refused(error.status_code, message, _ERROR_CODES.get(error.status_code, "refused")).response()
        response.headers.update(error.headers or {})
        return response

    middleware = [_cors(allowed_origins)] if allowed_origins else []
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: on_http_error})


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # OpenAI's client adds some of its own, and more with every version.
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )
