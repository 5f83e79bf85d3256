"""Converts GenerateBatch's messages to the values that Serving takes, and Serving's values to messages."""

from __future__ import annotations

from cluster.api.grpc.conversions.generate import prompts_from_proto, request_from_proto, response_to_proto
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import Prompt
from cluster.requests.samples import GenerateManyRequest, SampleChunk


async def batch_from_proto(
    request_id: str, message: generate_pb2.GenerateBatchRequest, timeout_s: float | None
) -> GenerateManyRequest:
    """Read a client's request. timeout_s: how long the call may still take

    Raises InvalidRequest if `each` has a prompt, or if one of `prompts` is empty.
    """
    each = await request_from_proto(request_id, message.each, timeout_s)
    if each.prompt is not None:
        raise InvalidRequest(FieldViolation("each", "a request with a prompt", "one without; prompts has them"))
    return GenerateManyRequest(
        prompts=[_present(index, prompt) for index, prompt in enumerate(await prompts_from_proto(message.prompts))],
        n=message.n if message.HasField("n") else 1,
        best_of=message.best_of if message.HasField("best_of") else None,
        each=each,
    )


def _present(index: int, prompt: Prompt | None) -> Prompt:
    if prompt is None:
        raise InvalidRequest(
            FieldViolation(f"prompts[{index}]", "empty", "one of text, token_ids, chat and prompt_embeds")
        )
    return prompt


def sample_to_proto(request_id: str, sample: SampleChunk) -> generate_pb2.GenerateBatchResponse:
    """Write one chunk of one sample."""
    return generate_pb2.GenerateBatchResponse(
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        response=response_to_proto(request_id, sample.chunk),
        cumulative_logprob=sample.cumulative_logprob,
    )
