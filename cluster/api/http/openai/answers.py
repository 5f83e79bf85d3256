"""What completions and chat completions have in common: choices, and how their tokens are counted."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from cluster.api.http.openai.token_text import TokenTexts
from cluster.api.http.requests import GenerationBody, WorkBody
from cluster.api.http.responses import PromptTokensDetails, Usage
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import GenerateChunk, GenerateRequest, Prompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest
from cluster.requests.serving import Serving


class Answer(Protocol):
    """Of one call: n choices for each prompt, one prompt after the other, in the costume of its API."""

    request: GenerateManyRequest
    names: Mapping[str, str]
    """What fields are called over HTTP, where they have other names."""

    def events(self, index: int, chunk: GenerateChunk) -> Sequence[msgspec.Struct]:
        """What a stream says of a choice's next chunk."""
        ...

    def last_events(self) -> list[msgspec.Struct]:
        """What a stream says at its end."""
        ...

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Keep a choice's next chunk for the whole."""
        ...

    def whole(self) -> msgspec.Struct:
        """Everything that was added."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk begins with."""

    id: str
    created: int
    model: str


def answer_id(prefix: str, body: WorkBody) -> str:
    """Of a call; its requests have it in their ids."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def request_of(
    head: AnswerHead,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    best_of: int | None = None,
) -> GenerateManyRequest:
    """What a call asks of Serving. Raises InvalidRequest for options of a stream that is none."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(FieldViolation("stream_options", "given", "none without stream: true"))
    each = GenerateRequest(
        prompt=None,
        request_id=head.id,
        model=body.model,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
    )
    return GenerateManyRequest(prompts=prompts, n=1 if body.n is None else body.n, best_of=best_of, each=each)


async def chunks_of(
    serving: Serving, request: GenerateManyRequest, timeout_s: float | None
) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """The chunks of a call's choices as they come, each with its choice's place. Closing aborts all of them."""
    request = replace(request, each=replace(request.each, timeout_s=timeout_s))
    if len(request.prompts) == 1 and request.n == 1 and request.best_of is None:
        async with aclosing(serving.generate(replace(request.each, prompt=request.prompts[0]))) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    async with aclosing(serving.generate_many(request)) as samples:
        async for sample in samples:
            yield sample.prompt_index * request.n + sample.sample_index, sample.chunk


class UsageCount:
    """Of all choices of a call."""

    def __init__(self, num_samples: int, *, has_output: bool = True) -> None:
        """num_samples: choices that have one prompt in common. has_output: False if what is made is not shown"""
        self._num_samples = num_samples
        self._has_output = has_output
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Count what a choice's next chunk brings."""
        leads = index % self._num_samples == 0
        if leads and chunk.prompt_token_ids is not None:
            self._num_prompt_tokens += len(chunk.prompt_token_ids)
        if self._has_output:
            self._num_output_tokens += len(chunk.token_ids)
        if leads and chunk.end is not None:
            self._num_cached_tokens += chunk.end.usage.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """So far."""
        num_prompt_tokens, num_output_tokens = self._num_prompt_tokens, self._num_output_tokens
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached_tokens),
        )


class TokenTextsOf(Protocol):
    """Finds the texts of a model version's tokens."""

    def __call__(self, model_version: int) -> TokenTexts:
        """Of this one."""
        ...
