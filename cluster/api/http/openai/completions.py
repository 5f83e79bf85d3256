"""The answers of /v1/completions: continuations of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import msgspec
from msgspec import UNSET

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.api.http.openai.answers import AnswerHead, TokenTextsOf, UsageCount, request_of
from cluster.api.http.openai.logprob_shapes import CompletionLogprobsWriter, joined, prompt_logprobs
from cluster.api.http.requests import CompletionRequest, StreamOptions
from cluster.api.http.responses import Completion, CompletionChoice
from cluster.api.http.responses import FinishReason as FinishReasonName
from cluster.api.http.sampling import NAMES, form_of, sampling_of
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import GenerateChunk, Prompt, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16
"""The default of max_tokens in OpenAI's API."""


class CompletionAnswer:
    """An Answer in the form of completions."""

    def __init__(self, head: AnswerHead, body: CompletionRequest, echoes: Sequence[str], texts: TokenTextsOf) -> None:
        """Make the request to Serving of a body.

        echoes: the prompts' texts, if answers begin with them; else empty. Raises InvalidRequest.
        """
        if body.echo and body.truncate_prompt_tokens is not None:
            shown = str(body.truncate_prompt_tokens)
            raise InvalidRequest(FieldViolation("truncate_prompt_tokens", shown, "none with echo, which is all of it"))
        form = form_of(body)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._is_echo_alone = bool(body.echo) and max_tokens == 0
        sampling = sampling_of(
            body,
            form,
            # An engine generates at least one token; an answer that only echoes the prompt leaves this token out.
            max_tokens=1 if self._is_echo_alone else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=_num_prompt_logprobs(body),
        )
        self.names: Mapping[str, str] = NAMES if form is None else form.names
        if body.prompt_logprobs is None:
            self.names = {**self.names, "prompt_logprobs": "logprobs"}
        self.request = request_of(head, body, prompts_from(body.prompt), sampling, body.best_of)
        self._head = head
        num_samples = max(1, self.request.n)
        self._usage = UsageCount(num_samples, has_output=not self._is_echo_alone)
        options = body.stream_options if body.stream and body.stream_options else StreamOptions()
        self._has_usage = options.include_usage
        self._counts_on = options.include_usage and options.continuous_usage_stats
        self._num_samples = num_samples
        self._body, self._texts = body, texts
        self._prompts = [_Prompt(text) for text in echoes or [""] * len(self.request.prompts)]
        # Choices are made when they begin, because Serving has not checked n yet.
        self._choices: dict[int, _Choice] = {}
        self._parts: dict[int, list[CompletionChoice]] = {}
        self._fingerprint = ""

    def events(self, index: int, chunk: GenerateChunk) -> Sequence[msgspec.Struct]:
        """Return the event that a stream sends for a choice's next chunk; none if the chunk has nothing to show.

        Tokens whose text is held back have an event with an empty text, so that a client sees when they came.
        """
        choice = self._read(index, chunk)
        has_tokens = bool(chunk.token_ids) and not self._is_echo_alone
        if not (choice.text or choice.finish_reason or choice.logprobs or has_tokens):
            return []
        completion = self._completion([choice])
        if self._counts_on:
            completion.usage = self._usage.usage
        return [completion]

    def last_events(self) -> list[msgspec.Struct]:
        """Return the events that a stream sends at its end: the usage, if it was asked for."""
        if not self._has_usage:
            return []
        completion = self._completion([])
        completion.usage = self._usage.usage
        return [completion]

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Keep a choice's next chunk for whole()."""
        self._parts.setdefault(index, []).append(self._read(index, chunk))

    def whole(self) -> Completion:
        """Return the whole answer, of all chunks that were added."""
        completion = self._completion([_joined(parts) for _, parts in sorted(self._parts.items())])
        completion.usage = self._usage.usage
        return completion

    def _read(self, index: int, chunk: GenerateChunk) -> CompletionChoice:
        self._usage.add(index, chunk)
        if chunk.model_version is not None:
            self._fingerprint = f"model-{chunk.model_version}"
        if (choice := self._choices.get(index)) is None:
            prompt = self._prompts[index // self._num_samples]
            prompt.learn(chunk)
            choice = self._choices[index] = _Choice(index, self._body, self._texts, prompt)
        if self._is_echo_alone:
            chunk = _without_output(chunk)
        return choice.read(chunk)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        head = self._head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=None if self._has_usage else UNSET,
            system_fingerprint=self._fingerprint or UNSET,
        )


@dataclass(slots=True)
class _Prompt:
    """A prompt, as its choices show it. echo: the text that they begin with; token_ids, logprobs: once known"""

    echo: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()

    def learn(self, chunk: GenerateChunk) -> None:
        """Take the prompt's tokens from a choice's first chunk, and its log-probabilities, which only sample 0 has."""
        self.token_ids = chunk.prompt_token_ids or ()
        self.logprobs = chunk.prompt_logprobs or self.logprobs


class _Choice:
    """Converts Serving's chunks to the new parts of one choice."""

    def __init__(self, index: int, body: CompletionRequest, texts: TokenTextsOf, prompt: _Prompt) -> None:
        self._index = index
        self._body, self._find_texts, self._prompt = body, texts, prompt
        self._logprobs: CompletionLogprobsWriter | None = None

    def read(self, chunk: GenerateChunk) -> CompletionChoice:
        choice = CompletionChoice(self._index, chunk.text)
        if chunk.model_version is not None:
            self._begin(choice, chunk.model_version)
        if self._logprobs is not None and chunk.logprobs:
            parts = [choice.logprobs] if choice.logprobs is not None else []
            choice.logprobs = joined([*parts, self._logprobs.write(chunk.logprobs)])
        if chunk.end is not None:
            choice.finish_reason = finish_reason_of(chunk.end.finish_reason)
            choice.stop_reason = stop_reason_of(chunk.end.stop_reason)
        if self._body.return_token_ids:
            choice.token_ids = chunk.token_ids
        return choice

    def _begin(self, choice: CompletionChoice, model_version: int) -> None:
        body, prompt, texts = self._body, self._prompt, self._find_texts(model_version)
        choice.text = prompt.echo + choice.text
        if body.return_token_ids:
            choice.prompt_token_ids = list(prompt.token_ids)
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(prompt.logprobs, texts, body.prompt_logprobs)
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobsWriter(texts, as_ids=as_ids, offset=len(prompt.echo))
            if body.echo:
                choice.logprobs = self._logprobs.write_prompt(
                    prompt.token_ids, prompt.logprobs, prompt.echo, body.logprobs
                )


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many log-probabilities the prompt needs, for prompt_logprobs and for an echo; None: none at all."""
    wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((one for one in wanted if one is not None), default=None)


def _without_output(chunk: GenerateChunk) -> GenerateChunk:
    end = chunk.end if chunk.end is None else replace(chunk.end, finish_reason=FinishReason.LENGTH, stop_reason=None)
    return replace(chunk, text="", token_ids=[], logprobs=None, end=end)


def prompts_from(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Return every prompt of a call."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if _are_token_ids(prompt):
        return [TokenPrompt(prompt)]
    return [TextPrompt(one) if isinstance(one, str) else TokenPrompt(one) for one in prompt if not isinstance(one, int)]


def finish_reason_of(reason: FinishReason) -> FinishReasonName:
    """Return OpenAI's name of a finish reason."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def stop_reason_of(reason: str | int | None) -> str | int | None:
    """Return vLLM's stop_reason: the stop string or the token that ended the output, or None."""
    return reason


def _are_token_ids(prompt: list[str] | list[int] | list[list[int]]) -> TypeGuard[list[int]]:
    return bool(prompt) and isinstance(prompt[0], int)


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    whole = CompletionChoice(parts[-1].index, "".join(part.text for part in parts))
    whole.finish_reason, whole.stop_reason = parts[-1].finish_reason, parts[-1].stop_reason
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    if logprobs:
        whole.logprobs = joined(logprobs)
    whole.prompt_token_ids, whole.prompt_logprobs = parts[0].prompt_token_ids, parts[0].prompt_logprobs
    if parts[-1].token_ids is not UNSET:
        whole.token_ids = [token_id for part in parts for token_id in part.token_ids or ()]
    return whole
