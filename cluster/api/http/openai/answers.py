"""The common part of completions and chat completions: their requests, choices and usage."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from cluster.access.aims import NO_AIMS, Aims
from cluster.api.http.openai.logprob_texts import TokenTexts
from cluster.api.http.requests import GenerationBody, WorkBody
from cluster.api.http.responses import PromptTokensDetails, Usage
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import GenerateChunk, GenerateRequest, Prompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.samples import GenerateManyRequest
from cluster.requests.serving import Serving


class Answer(Protocol):
    """The answer to one call, in the form of its API: n choices for each prompt, one prompt after the other.

    request: what the call asks of Serving
    names:   the fields' names over HTTP, by Serving's names, where the two differ
    """

    request: GenerateManyRequest
    names: Mapping[str, str]

    def events(self, index: int, chunk: GenerateChunk) -> Sequence[msgspec.Struct]:
        """Return the events that a stream sends for a choice's next chunk; maybe none."""
        ...

    def last_events(self) -> list[msgspec.Struct]:
        """Return the events that a stream sends at its end; maybe none."""
        ...

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Keep a choice's next chunk for whole()."""
        ...

    def whole(self) -> msgspec.Struct:
        """Return the whole answer, of all chunks that were added."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that an answer, and every chunk of a stream, begins with."""

    id: str
    created: int
    model: str


def answer_id(prefix: str, body: WorkBody) -> str:
    """Return the id of a call's answer; the call's requests have it in their ids."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def request_of(
    head: AnswerHead,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    best_of: int | None = None,
) -> GenerateManyRequest:
    """Return a call's request to Serving. Raises InvalidRequest if stream_options are given without stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(FieldViolation("stream_options", "given", "none without stream: true"))
    each = GenerateRequest(
        prompt=None,
        request_id=head.id,
        model=body.model,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        slo=NO_AIMS if body.slo is None else Aims(**body.slo.model_dump()),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
    )
    return GenerateManyRequest(prompts=prompts, n=1 if body.n is None else body.n, best_of=best_of, each=each)


async def chunks_of(
    serving: Serving, request: GenerateManyRequest, timeout_s: float | None
) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """Yield the chunks of a call's choices as they come, each with its choice's index.

    Closing the generator aborts all choices.
    """
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
    """Counts the tokens of all choices of a call."""

    def __init__(self, num_samples: int, *, has_output: bool = True) -> None:
        """Count from 0.

        num_samples: the choices of one prompt
        has_output:  whether output tokens count; they do not where the output is not shown
        """
        self._num_samples = num_samples
        self._has_output = has_output
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Count the tokens of a choice's next chunk."""
        leads = index % self._num_samples == 0
        if leads and chunk.prompt_token_ids is not None:
            self._num_prompt_tokens += len(chunk.prompt_token_ids)
        if self._has_output:
            self._num_output_tokens += len(chunk.token_ids)
        if leads and chunk.end is not None:
            self._num_cached_tokens += chunk.end.usage.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        num_prompt_tokens, num_output_tokens = self._num_prompt_tokens, self._num_output_tokens
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached_tokens),
        )


class TokenTextsOf(Protocol):
    """A function that finds the texts of a model version's tokens."""

    def __call__(self, model_version: int) -> TokenTexts:
        """Return the texts of this version's tokens."""
        ...
