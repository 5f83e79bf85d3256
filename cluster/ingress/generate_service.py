"""raypd.v1.GenerateService on Serving.generate()."""

from __future__ import annotations

import logging
import uuid
from contextlib import aclosing

import grpc.aio

from cluster.errors import ClusterError
from cluster.ingress.conversions import request_from_proto, response_to_proto
from cluster.ingress.gate import Gate
from cluster.ingress.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.ingress.statuses import internal_error, status_of
from cluster.serving import Serving

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """A call is a request: a client that cancels, dies or runs out of time cancels its task, and so aborts."""

    def __init__(self, serving: Serving, gate: Gate) -> None:
        self._serving = serving
        self._gate = gate

    async def Generate(self, request: generate_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream a request's output."""
        request_id = request.request_id or uuid.uuid4().hex
        try:
            async with self._gate:
                await self._stream(request_id, request, context)
        except ClusterError as error:
            status = status_of(error)
        except (grpc.aio.BaseError, grpc.RpcError):
            raise  # The call itself is over: nobody is left to be told.
        except Exception:
            logger.exception("a request failed by a bug", extra={"request_id": request_id})
            status = internal_error(request_id)
        else:
            return
        await context.abort(status.code, status.message, status.trailing_metadata)

    async def _stream(self, request_id: str, message: generate_pb2.GenerateRequest, context: _Context) -> None:
        request = request_from_proto(request_id, message, context.time_remaining())
        # Closing is what aborts: the generator must not be left to the garbage collector.
        async with aclosing(self._serving.generate(request)) as chunks:
            async for chunk in chunks:
                await context.write(response_to_proto(request_id, chunk))
