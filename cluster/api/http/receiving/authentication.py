"""Checks a call's token by its headers, before its body is received and before the caller learns which paths exist."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.access.access_control import AccessControl
from cluster.access.caller import ANYBODY, Caller
from cluster.api.http.errors import error_of
from cluster.errors import ClusterError

_CALLER: Final = "raypd.caller"
IS_RECEIVED: Final = "raypd.is_received"
"""The scope's key of a function that returns whether the whole request has been received."""


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a call; ANYBODY if the call's path needs no token."""
    caller: Caller = scope.get(_CALLER, ANYBODY)
    return caller


class Authentication:
    """Middleware that lets calls with a valid token through, and calls for open paths."""

    def __init__(self, app: ASGIApp, access: AccessControl, open_paths: frozenset[str]) -> None:
        """Wrap an application. open_paths: the paths that need no token"""
        self._app = app
        self._access = access
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["path"] not in self._open_paths:
            try:
                scope[_CALLER] = self._access.authenticate(Headers(scope=scope).get("authorization"))
            except ClusterError as error:
                await error_of(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class EveryAnswer:
    """Middleware that counts answers, and closes the connection of a request that is answered before all of it came."""

    def __init__(self, app: ASGIApp, on_answer: Callable[[Scope, int], None]) -> None:
        """Wrap an application. on_answer: is called with each call's scope and the status of its answer"""
        self._app = app
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""

        def sent(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._on_answer(scope, message["status"])
                is_received: Callable[[], bool] | None = scope.get(IS_RECEIVED)
                if is_received is not None and not is_received():
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            return send(message)

        await self._app(scope, receive, sent)
