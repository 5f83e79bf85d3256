"""Streams of output that go on at another ingress when theirs goes away."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.errors import CallFailed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import RetryPolicy
from cluster.client.streams.attempts import Attempts
from cluster.client.streams.calls import responses_of
from cluster.client.streams.stream_progress import StreamProgress


def stream_once(
    ingress: Ingress, request: generate_pb2.GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream the responses of one call. Closing the generator cancels the call. Raises CallFailed."""
    return responses_of(ingress, ingress.generate.Generate, request, timeout_s)


async def stream_resuming(
    ingresses: Ingresses, request: generate_pb2.GenerateRequest, timeout_s: float | None, retry_policy: RetryPolicy
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream an answer, in further calls where one is cut. Closing the generator cancels the call that runs.

    Until an ingress has accepted the request, each is called once, and again if one has named a delay. Raises
    CallFailed: at once if the request itself is at fault, otherwise when no ingress goes on with it in time.
    """
    answer = stream_on(StreamProgress(request), Attempts(ingresses, timeout_s, retry_policy))
    async with aclosing(answer) as responses:
        async for response in responses:
            yield response


async def stream_on(
    progress: StreamProgress, attempts: Attempts
) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    """Stream the rest of an answer; otherwise as stream_resuming()."""
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
                return  # The last response has come; only the call's status is missing.
            if not failure.is_passing:
                raise
            # An ingress that was connected, and is not any more, may have accepted the request.
            is_cut = was_connected and not ingress.is_connected
            attempts.note_failure(ingress, failure, is_under_way=progress.has_begun or is_cut)
            ingress = await attempts.next_ingress(failure)
