"""A stream that outlives its ingress: asked for again, with the tokens that have come, wherever the ingress is then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import grpc

from cluster.client import CallFailed, GenerateClient
from cluster.ingress.protos.raypd.v1 import generate_pb2

_PAUSE_S: Final = 0.2
_RESUMABLE: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})


async def send_and_resume(
    address: str, request: generate_pb2.GenerateRequest, timeout_s: float
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream the answer; positions go on over every connection. Raises CallFailed, at the latest at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    sent = generate_pb2.GenerateRequest()
    sent.CopyFrom(request)
    num_resumed = 0
    while True:
        try:
            # A connection of its own: gRPC would wait longer and longer to dial a dead ingress again.
            async with GenerateClient(address) as client:
                async with aclosing(client.send(sent, max(0.001, deadline_s - time.monotonic()))) as responses:
                    async for response in responses:
                        sent.output_token_ids.extend(response.token_ids)
                        yield response
                return
        except CallFailed as error:
            if error.code not in _RESUMABLE:
                raise
        num_resumed += 1
        sent.request_id = f"{request.request_id}~{num_resumed}"
        await asyncio.sleep(_PAUSE_S)
