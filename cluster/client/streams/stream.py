"""Streams of output that outlive the ingress that they come from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.errors import CallFailed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import Patience
from cluster.client.streams.attempts import Attempts
from cluster.client.streams.calls import responses_of
from cluster.client.streams.stream_progress import StreamProgress


def stream_once(
    ingress: Ingress, request: generate_pb2.GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream one call's responses. Closing it cancels the call. Raises CallFailed."""
    return responses_of(ingress, ingress.generate.Generate, request, timeout_s)


async def stream_resuming(
    ingresses: Ingresses, request: generate_pb2.GenerateRequest, timeout_s: float | None, patience: Patience
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream an answer, over further calls where one is cut. Closing it cancels the call that runs.

    Before anything has come, each ingress is called once; if one has said when to come back, again after that. Raises
    CallFailed: the first failure that is the request's own, or the last one in time.
    """
    answer = stream_on(StreamProgress(request), Attempts(ingresses, timeout_s, patience))
    async with aclosing(answer) as responses:
        async for response in responses:
            yield response


async def stream_on(
    progress: StreamProgress, attempts: Attempts
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream what is left of an answer; otherwise as stream_resuming()."""
    ingress = await attempts.first()
    while True:
        was_connected = ingress.is_connected
        try:
            async with aclosing(stream_once(ingress, progress.next_request(), attempts.left_s())) as responses:
                async for response in responses:
                    attempts.renew()
                    yield progress.take(response)
            return
        except CallFailed as failure:
            if progress.has_ended:
                return  # All that was to come has come, but for the call's own end.
            if not failure.is_passing:
                raise
            # It had been taken on by an ingress that is gone now.
            is_cut = was_connected and not ingress.is_connected
            attempts.note_failure(ingress, failure, is_under_way=progress.has_begun or is_cut)
            ingress = await attempts.next_ingress(failure)
