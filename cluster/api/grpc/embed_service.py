"""The service raypd.v1.EmbedService, on Serving.embed(), classify() and score()."""

from __future__ import annotations

import uuid
from typing import Any

import grpc.aio

from cluster.api.grpc.conversions.embed import (
    classify_request_from_proto,
    classify_result_to_proto,
    embed_request_from_proto,
    embed_result_to_proto,
    score_request_from_proto,
    score_result_to_proto,
)
from cluster.api.grpc.list_lengths import check_vectors
from cluster.api.protos.raypd.v1 import embed_pb2, embed_pb2_grpc
from cluster.requests.serving import Serving

_Context = grpc.aio.ServicerContext[Any, Any]


class EmbedService(embed_pb2_grpc.EmbedServiceServicer):
    """The methods for embeddings, classes and scores. Errors become statuses in interceptor.py.

    A client that cancels, dies or runs out of time cancels the task of its call, which aborts all its inputs.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Embed(self, request: embed_pb2.EmbedRequest, context: _Context) -> embed_pb2.EmbedResponse:  # noqa: N802
        """Return an embedding of each input."""
        await self._prepare(request)
        result = await self._serving.embed(await embed_request_from_proto(request, context.time_remaining()))
        return embed_result_to_proto(request.request_id, result)

    async def Classify(  # noqa: N802
        self, request: embed_pb2.ClassifyRequest, context: _Context
    ) -> embed_pb2.ClassifyResponse:
        """Return the scores of the classification head's classes for each input."""
        await self._prepare(request)
        result = await self._serving.classify(await classify_request_from_proto(request, context.time_remaining()))
        return classify_result_to_proto(request.request_id, result)

    async def Score(self, request: embed_pb2.ScoreRequest, context: _Context) -> embed_pb2.ScoreResponse:  # noqa: N802
        """Return for each document how well it answers the query."""
        await self._prepare(request)
        result = await self._serving.score(await score_request_from_proto(request, context.time_remaining()))
        return score_result_to_proto(request.request_id, result)

    async def _prepare(
        self, request: embed_pb2.EmbedRequest | embed_pb2.ClassifyRequest | embed_pb2.ScoreRequest
    ) -> None:
        processor = self._serving.newest_model().input_processor
        await check_vectors(request, processor.limits, processor.model.max_model_len)
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
