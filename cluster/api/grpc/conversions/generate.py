"""Converts raypd.v1's messages to the values that Serving takes, and Serving's values to messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.access.aims import AIMS, Aims
from cluster.api.protos.raypd.v1 import generate_pb2, model_pb2
from cluster.parameters.generation import (
    ChatMessage,
    ChatPrompt,
    EmbedsPrompt,
    EngineReport,
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
    GenerateTimings,
    ImageInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from cluster.parameters.sampling_options import PARAMETERS, SamplingOptions
from kv_transfer.transfer_stats import TransferTimings

_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    one.name: tuple if one.is_list else dict if one.is_map else one.kind
    for one in PARAMETERS.values()
    if one.name in generate_pb2.SamplingParams.DESCRIPTOR.fields_by_name
}
"""For each field what makes the parameter's value of the field's. structured_output is a oneof, and so has no field."""
_EMBEDS_DTYPES: Final = {
    generate_pb2.EMBEDS_DTYPE_UNSPECIFIED: "unspecified",
    generate_pb2.EMBEDS_DTYPE_FLOAT32: "float32",
    generate_pb2.EMBEDS_DTYPE_BFLOAT16: "bfloat16",
}
_FINISH_REASONS: Final = {
    FinishReason.STOP: generate_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
}


_SLICE_BYTES: Final = 65_536
"""The size of the prompts that are read before the event loop gets a turn."""
_OBJECT_BYTES: Final = 64
"""The size that a message of a conversation, or a part of one, counts beside its text: its object takes that long."""
_SLICE_TOKENS: Final = 65_536
"""The number of tokens that are read before the event loop gets a turn; this takes 3 ms."""


async def request_from_proto(
    request_id: str, message: generate_pb2.GenerateRequest, timeout_s: float | None
) -> GenerateRequest:
    """Read a client's request. timeout_s: how long the call may still take."""
    return GenerateRequest(
        request_id=request_id,
        prompt=await prompt_from_proto(message),
        model=message.model,
        lora_name=message.lora_name,
        lora_digest=message.lora_digest,
        sampling=_sampling(message.sampling_params),
        priority=message.priority,
        output_token_ids=tuple(await token_ids_from_proto(message.output_token_ids)),
        model_version=message.model_version,
        cache_salt=message.cache_salt,
        slo=Aims(**{name: getattr(message.slo, name) for name in AIMS if message.slo.HasField(name)}),
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else None,
        images=tuple(_image(image) for image in message.images),
        timeout_s=timeout_s,
    )


def response_to_proto(request_id: str, chunk: GenerateChunk) -> generate_pb2.GenerateResponse:
    """Write one chunk of an answer."""
    message = generate_pb2.GenerateResponse(
        request_id=request_id,
        text=chunk.text,
        token_ids=chunk.token_ids,
        first_position=chunk.first_position,
        logprobs=_logprobs(chunk.logprobs or ()),
        prompt_logprobs=_logprobs(chunk.prompt_logprobs or ()),
        seed=chunk.seed,
        model_version=chunk.model_version,
        lora_digest=chunk.lora_digest,
    )
    if chunk.end is not None:
        _set_end(message, chunk.end)
    return message


async def prompt_from_proto(
    message: generate_pb2.GenerateRequest | generate_pb2.Prompt | model_pb2.TokenizeRequest,
    pace: Pace | None = None,
) -> Prompt | None:
    """Read a prompt; None if there is none. pace: of all prompts that are read one after the other"""
    pace = pace or Pace()
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids" if not isinstance(message, model_pb2.TokenizeRequest):
            return TokenPrompt(await token_ids_from_proto(message.token_ids.ids))
        case "chat":
            return ChatPrompt([await _chat_message(turn, pace) for turn in message.chat.messages])
        case "prompt_embeds" if not isinstance(message, model_pb2.TokenizeRequest):
            embeds = message.prompt_embeds
            dtype = _EMBEDS_DTYPES.get(embeds.dtype, str(embeds.dtype))
            return EmbedsPrompt(embeds.data, embeds.num_tokens, embeds.hidden_size, dtype)
        case _:
            return None


async def token_ids_from_proto(message: Sequence[int]) -> list[int]:
    """Read a list of tokens, in slices between which the event loop runs. It can have a million of them."""
    token_ids: list[int] = []
    while len(token_ids) < len(message):
        if token_ids:
            await asyncio.sleep(0)
        token_ids += message[len(token_ids) : len(token_ids) + _SLICE_TOKENS]
    return token_ids


async def prompts_from_proto(messages: Iterable[generate_pb2.Prompt]) -> list[Prompt | None]:
    """Read many prompts, in slices between which the event loop runs. They can have millions of tokens together."""
    prompts, pace = [], Pace()
    for message in messages:
        prompts.append(await prompt_from_proto(message, pace))
        # The messages of a conversation were counted one by one.
        if message.WhichOneof("prompt") != "chat" and pace.count(message.ByteSize()):
            await asyncio.sleep(0)
    return prompts


class Pace:
    """Counts what was read of a call's prompts since the event loop last had a turn."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def count(self, num_bytes: int) -> bool:
        """Count more bytes; returns whether the event loop should get a turn now, from which the count begins anew."""
        self._num_bytes += num_bytes
        if self._num_bytes <= _SLICE_BYTES:
            return False
        self._num_bytes = 0
        return True


async def _chat_message(message: generate_pb2.ChatMessage, pace: Pace) -> ChatMessage:
    parts: list[str | ImageInput] = []
    for part in message.parts:
        parts.append(_part(part))
        if pace.count(_OBJECT_BYTES + part.ByteSize()):
            await asyncio.sleep(0)
    content = message.content
    if pace.count(_OBJECT_BYTES + len(content)):
        await asyncio.sleep(0)
    return ChatMessage(message.role, content, parts=tuple(parts))


def _part(message: generate_pb2.ContentPart) -> str | ImageInput:
    return _image(message.image) if message.WhichOneof("part") == "image" else message.text


def _image(message: generate_pb2.Image) -> ImageInput:
    return ImageInput(message.data, message.data_uri)


def _sampling(message: generate_pb2.SamplingParams) -> SamplingOptions:
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        read = _READERS.get(field.name)
        if read is not None:
            given[field.name] = read(value)
    return SamplingOptions(structured_output=_structured_output(message), **given)


def _structured_output(message: generate_pb2.SamplingParams) -> StructuredOutputParams | None:
    match message.WhichOneof("structured_output"):
        case None:
            return None
        case "choice":
            return StructuredOutputParams("choice", json.dumps(list(message.choice.choices), ensure_ascii=False))
        case "json_object":
            return StructuredOutputParams("json_object", "" if message.json_object else "false")
        case kind:
            return StructuredOutputParams(kind, getattr(message, kind))


def _logprobs(logprobs: Iterable[TokenLogprobs]) -> list[generate_pb2.TokenLogprobs]:
    return [
        generate_pb2.TokenLogprobs(
            token_id=position.token_ids[0],
            logprob=position.logprobs[0],
            rank=position.rank,
            # The first entry belongs to the token that is at the position.
            top=[
                generate_pb2.TopLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(position.token_ids[1:], position.logprobs[1:], strict=True)
            ],
        )
        for position in logprobs
    ]


def _set_end(message: generate_pb2.GenerateResponse, end: GenerateEnd) -> None:
    message.finish_reason = _FINISH_REASONS[end.finish_reason]
    if isinstance(end.stop_reason, str):
        message.stop_string = end.stop_reason
    elif end.stop_reason is not None:
        message.stop_token_id = end.stop_reason
    message.usage.prompt_tokens = end.usage.num_prompt_tokens
    message.usage.output_tokens = end.usage.num_output_tokens
    message.usage.cached_tokens = end.usage.num_cached_tokens
    message.timings.CopyFrom(_timings(end.timings))


def _timings(timings: GenerateTimings) -> generate_pb2.Timings:
    prefill = timings.prefill.timings if timings.prefill is not None else None
    prefill = prefill or timings.decode.timings
    transfer = timings.decode.timings.transfer if timings.decode.timings is not None else None
    return generate_pb2.Timings(
        ttft_s=timings.ttft_s,
        tpot_s=timings.tpot_s,
        queued_s=prefill.queued_s if prefill is not None else None,
        prefill_s=prefill.prefill_s if prefill is not None else None,
        transfer=_transfer(transfer) if transfer is not None else None,
        prefill_engine=_engine_timings(timings.prefill) if timings.prefill is not None else None,
        decode_engine=_engine_timings(timings.decode),
    )


def _transfer(transfer: TransferTimings) -> generate_pb2.Transfer:
    return generate_pb2.Transfer(
        kv_bytes=transfer.num_bytes, transfer_s=transfer.transfer_s, exposed_s=transfer.exposed_s
    )


def _engine_timings(report: EngineReport) -> generate_pb2.EngineTimings:
    timings = report.timings
    if timings is None:
        return generate_pb2.EngineTimings(engine_id=report.engine_id)
    return generate_pb2.EngineTimings(
        engine_id=report.engine_id,
        queued_s=timings.queued_s,
        prefill_s=timings.prefill_s,
        computed_prompt_tokens=timings.num_prompt_tokens_computed,
        cached_tokens=timings.num_cached_tokens,
        preemptions=timings.num_preemptions,
        fetched_images=timings.num_fetched_images,
        status_changes=[
            generate_pb2.StatusChange(status=f"REQUEST_STATUS_{change.status.name}", at_s=change.at_s)
            for change in timings.status_changes
        ],
    )
