"""Converts EmbedService's messages to the values that Serving takes, and Serving's values to messages."""

from __future__ import annotations

from typing import Any, Final

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.sampling_params import Pooling
from cluster.api.grpc.conversions.generate import prompt_from_proto, prompts_from_proto
from cluster.api.protos.raypd.v1 import embed_pb2, generate_pb2, model_pb2
from cluster.parameters.generation import Usage
from cluster.vectors.vector_requests import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    ScoreRequest,
    ScoreResult,
)

_NUMBERS: Final[dict[Pooling, embed_pb2.Pooling]] = {
    "last": embed_pb2.POOLING_LAST,
    "mean": embed_pb2.POOLING_MEAN,
    "cls": embed_pb2.POOLING_CLS,
}


async def embed_request_from_proto(message: embed_pb2.EmbedRequest, timeout_s: float | None) -> EmbedRequest:
    """Read a client's request. timeout_s: how long the call may still take."""
    pooling: str | None = None
    if message.pooling != embed_pb2.POOLING_UNSPECIFIED:
        # An unknown number becomes the pooling's name, so that the later refusal shows the number.
        names = {number: name for name, number in _NUMBERS.items()}
        pooling = names.get(message.pooling, str(message.pooling))
    return EmbedRequest(
        inputs=await prompts_from_proto(message.inputs),
        pooling=pooling,
        normalize=message.normalize if message.HasField("normalize") else None,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        **_envelope(message, timeout_s),
    )


async def classify_request_from_proto(message: embed_pb2.ClassifyRequest, timeout_s: float | None) -> ClassifyRequest:
    """Read a client's request. timeout_s: how long the call may still take."""
    inputs = await prompts_from_proto(message.inputs)
    return ClassifyRequest(inputs=inputs, activate=not message.raw_logits, **_envelope(message, timeout_s))


async def score_request_from_proto(message: embed_pb2.ScoreRequest, timeout_s: float | None) -> ScoreRequest:
    """Read a client's request. timeout_s: how long the call may still take."""
    return ScoreRequest(
        query=await prompt_from_proto(message.query),
        documents=await prompts_from_proto(message.documents),
        activate=not message.raw_logits,
        **_envelope(message, timeout_s),
    )


def embed_result_to_proto(request_id: str, result: EmbedResult) -> embed_pb2.EmbedResponse:
    """Write the answer to a request for embeddings."""
    return embed_pb2.EmbedResponse(
        request_id=request_id,
        embeddings=[embed_pb2.Embedding(values=values) for values in result.embeddings],
        usage=_usage(result.usage),
        model_version=result.model_version,
    )


def classify_result_to_proto(request_id: str, result: ClassifyResult) -> embed_pb2.ClassifyResponse:
    """Write the answer to a request for classes."""
    return embed_pb2.ClassifyResponse(
        request_id=request_id,
        labels=result.labels,
        classifications=[
            embed_pb2.Classification(scores=scores, label=result.labels[scores.index(max(scores))])
            for scores in result.scores
        ],
        usage=_usage(result.usage),
        model_version=result.model_version,
    )


def score_result_to_proto(request_id: str, result: ScoreResult) -> embed_pb2.ScoreResponse:
    """Write the answer to a request for scores."""
    return embed_pb2.ScoreResponse(
        request_id=request_id,
        scores=result.scores,
        usage=_usage(result.usage),
        model_version=result.model_version,
    )


def vectors_to_proto(facts: PoolingFacts) -> model_pb2.VectorDescription:
    """Write the facts about the vectors that a model gives."""
    return model_pb2.VectorDescription(
        embedding_size=facts.embedding_size,
        pooling=_NUMBERS[facts.pooling],
        normalize=facts.normalize,
        matryoshka_dimensions=facts.matryoshka_dimensions,
        labels=facts.labels,
    )


def _envelope(
    message: embed_pb2.EmbedRequest | embed_pb2.ClassifyRequest | embed_pb2.ScoreRequest, timeout_s: float | None
) -> dict[str, Any]:
    """Read the fields that all requests for vectors have."""
    return {
        "request_id": message.request_id,
        "model": message.model,
        "priority": message.priority,
        "model_version": message.model_version,
        "cache_salt": message.cache_salt,
        "truncate_prompt_tokens": (
            message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        ),
        "timeout_s": timeout_s,
    }


def _usage(usage: Usage) -> generate_pb2.Usage:
    return generate_pb2.Usage(prompt_tokens=usage.num_prompt_tokens, cached_tokens=usage.num_cached_tokens)
