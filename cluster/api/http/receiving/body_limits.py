"""Refuses bodies that are too large, come too slowly, or are not JSON; by the headers alone if these are enough."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request

from cluster.api.http.errors import HttpError, refused
from cluster.api.http.receiving.body_budget import BodyShare
from cluster.settings.http import HttpConfig


class Refused(Exception):
    """A call is refused before its body is parsed."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.detail.message)
        self.error = error


def check_body_headers(headers: Headers, config: HttpConfig) -> None:
    """Check the type and the length of a call's body by its headers. Raises Refused."""
    kind = headers.get("content-type", "")
    if not _is_json(kind):
        shown = f"content-type is {kind!r:.100}" if kind else "there is no content-type"
        message = f"{shown}; send JSON, and the header `content-type: application/json` (curl: -H)"
        raise Refused(refused(415, message, "unsupported_media_type"))
    if int(headers.get("content-length", 0)) > config.max_body_bytes:
        raise Refused(_too_large(config))


async def receive_body(request: Request, share: BodyShare, config: HttpConfig) -> list[bytes]:
    """Receive a call's body; returns the parts in which it came. Raises Refused, Overloaded, ClientDisconnect."""
    # The parts are joined at the end, because buffers that grow side by side fragment the memory.
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(config.receive_timeout_s):
            async for data in request.stream():
                num_bytes += len(data)
                if num_bytes > config.max_body_bytes:
                    raise Refused(_too_large(config))
                share.add(len(data))
                parts.append(data)
    except TimeoutError as error:
        message = f"the body did not come within {config.receive_timeout_s:g} s"
        raise Refused(refused(408, message, "timeout")) from error
    return parts


def _too_large(config: HttpConfig) -> HttpError:
    return refused(413, f"the body has more than {config.max_body_bytes} bytes", "body_too_large")


def _is_json(content_type: str) -> bool:
    """Whether a content type is JSON, or a format based on JSON, with any parameters."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
