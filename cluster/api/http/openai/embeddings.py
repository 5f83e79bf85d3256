"""The requests and answers of /v1/embeddings."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from cluster.api.http.openai.answers import AnswerHead
from cluster.api.http.openai.completions import prompts_from
from cluster.api.http.requests import EmbeddingRequest, VectorBody
from cluster.api.http.responses import Embedding, EmbeddingList, EmbeddingUsage
from cluster.vectors.vector_requests import EmbedRequest, EmbedResult


def embed_request(head: AnswerHead, body: EmbeddingRequest, timeout_s: float | None) -> EmbedRequest:
    """Return a call's request to Serving."""
    return EmbedRequest(
        inputs=prompts_from(body.input),
        pooling=body.pooling,
        normalize=body.normalize,
        dimensions=body.dimensions,
        **envelope(head, body, timeout_s),
    )


def envelope(head: AnswerHead, body: VectorBody, timeout_s: float | None) -> dict[str, Any]:
    """Return the fields that all requests for vectors have."""
    return {
        "request_id": head.id,
        "model": body.model,
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "timeout_s": timeout_s,
    }


def embedding_list(head: AnswerHead, result: EmbedResult, *, as_base64: bool) -> EmbeddingList:
    """Return the answer to the client. as_base64: whether embeddings are base64 instead of lists of numbers"""
    num_tokens = result.usage.num_prompt_tokens
    return EmbeddingList(
        data=[
            Embedding(index, _packed(vector) if as_base64 else vector) for index, vector in enumerate(result.embeddings)
        ],
        model=head.model,
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )


def _packed(vector: Sequence[float]) -> str:
    """Return a vector as OpenAI's client asks for it by default: base64 of float32, in the machine's little-endian."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
