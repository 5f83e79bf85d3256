"""A single call to an ingress that answers by a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar, cast

import grpc.aio

from cluster.client.errors import as_call_failed
from cluster.client.known_ingresses import Ingress

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


async def responses_of(
    ingress: Ingress,
    method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response],
    request: _Request,
    timeout_s: float | None,
) -> AsyncGenerator[_Response, None]:
    """Yield each response of a call. Closing the generator cancels the call. Raises CallFailed."""
    call = method(request, timeout=timeout_s)
    # gRPC's generator and its call refer to each other. Unless the generator is closed, they keep the channel's
    # connection open after the channel is closed, until garbage is collected.
    responses = cast("AsyncGenerator[_Response, None]", aiter(call))
    try:
        with as_call_failed():
            async with aclosing(responses):
                async for response in responses:
                    ingress.note_answer()
                    yield response
    finally:
        call.cancel()
