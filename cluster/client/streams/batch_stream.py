"""Streams of batches that go on at another ingress when theirs goes away."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.api.protos.side_by_side import side_by_side
from cluster.client.errors import CallFailed
from cluster.client.known_ingresses import Ingress, Ingresses
from cluster.client.retry_limits import RetryPolicy
from cluster.client.streams.attempts import Attempts
from cluster.client.streams.batch_progress import BatchProgress, Rest
from cluster.client.streams.calls import responses_of
from cluster.client.streams.stream import stream_on
from cluster.client.streams.stream_progress import StreamProgress

_Responses = AsyncGenerator[generate_pb2.GenerateBatchResponse, None]


def batch_once(ingress: Ingress, request: generate_pb2.GenerateBatchRequest, timeout_s: float | None) -> _Responses:
    """Stream the responses of one call. Closing the generator cancels the call. Raises CallFailed."""
    return responses_of(ingress, ingress.generate.GenerateBatch, request, timeout_s)


async def batch_resuming(
    ingresses: Ingresses,
    request: generate_pb2.GenerateBatchRequest,
    timeout_s: float | None,
    retry_policy: RetryPolicy,
    *,
    is_under_way: bool = False,
) -> _Responses:
    """Stream a batch, in further calls where one is cut. Closing the generator cancels the calls that run.

    Until a response has come, a call that fails is repeated as in stream_resuming(). After that the rest is divided,
    see batch_progress.py.
    is_under_way: whether an ingress had accepted the batch
    Raises CallFailed; then all other samples are aborted.
    """
    progress = BatchProgress(request)
    attempts = Attempts(ingresses, timeout_s, retry_policy, is_under_way=is_under_way)
    ingress = await attempts.first()
    while True:
        was_connected = ingress.is_connected
        try:
            async with aclosing(batch_once(ingress, progress.next_request(), attempts.left_s())) as responses:
                async for response in responses:
                    for part in progress.take(response):
                        yield part
            return
        except CallFailed as failure:
            if progress.has_ended:
                return
            if not failure.is_passing:
                raise
            is_cut = was_connected and not ingress.is_connected
            attempts.note_failure(ingress, failure, is_under_way=progress.has_begun or is_cut)
            if progress.has_begun:
                break
            ingress = await attempts.next_ingress(failure)
    async with aclosing(_go_on(progress, ingresses, attempts.left_s(), retry_policy)) as parts:
        async for part in parts:
            yield part


async def _go_on(
    progress: BatchProgress, ingresses: Ingresses, timeout_s: float | None, retry_policy: RetryPolicy
) -> _Responses:
    """Stream the rest of a batch whose call was cut."""

    async def sample(place: tuple[int, int], one: StreamProgress) -> _Responses:
        attempts = Attempts(ingresses, timeout_s, retry_policy, is_under_way=True)
        async with aclosing(stream_on(one, attempts)) as responses:
            async for response in responses:
                yield progress.take_of(place, response)

    rest = progress.rest()
    streams = [sample(place, one) for place, one in rest.samples.items()]
    if rest.batch is not None:
        smaller = batch_resuming(ingresses, rest.batch, timeout_s, retry_policy, is_under_way=True)
        streams.append(_renumbered(smaller, rest, progress))
    async with aclosing(side_by_side(streams)) as parts:
        async for _, part in parts:
            yield part


async def _renumbered(smaller: _Responses, rest: Rest, progress: BatchProgress) -> _Responses:
    """Yield the responses of a smaller batch as parts of the whole batch."""
    async with aclosing(smaller) as parts:
        async for part in parts:
            part.prompt_index = rest.prompt_indices[part.prompt_index]
            part.response.request_id = progress.request_id
            yield part
