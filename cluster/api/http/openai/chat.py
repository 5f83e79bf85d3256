"""The answers of /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from cluster.api.http.openai.answers import AnswerHead, TokenTextsOf, UsageCount, request_of
from cluster.api.http.openai.chat_prompt import chat_prompt
from cluster.api.http.openai.completions import finish_reason_of
from cluster.api.http.openai.logprob_shapes import chat_logprobs, prompt_logprobs
from cluster.api.http.openai.logprob_texts import TokenTexts
from cluster.api.http.openai.tools import ToolUse
from cluster.api.http.parsing.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from cluster.api.http.requests import ChatCompletionRequest, StreamOptions
from cluster.api.http.responses import (
    AnswerMessage,
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    FinishReason,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
)
from cluster.api.http.sampling import NAMES, form_of, sampling_of
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import GenerateChunk
from cluster.settings.http import HttpConfig

_MISTRAL_ID_CHARS = 9
"""The length of tool calls' ids for Mistral's models, whose templates refuse others."""


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a tool call. index: among the answer's calls"""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A further part of a tool call's arguments."""

    index: int
    text: str


MessagePiece: TypeAlias = Reasoning | Content | Call | Arguments


@dataclass(frozen=True, slots=True)
class Part:
    """The new part of a choice. finish_reason: only in the last part"""

    pieces: Sequence[MessagePiece]
    logprobs: ChatLogprobs | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChatAnswer:
    """An Answer in the form of chat completions."""

    def __init__(self, head: AnswerHead, body: ChatCompletionRequest, texts: TokenTextsOf, config: HttpConfig) -> None:
        """Make the request to Serving of a body. texts: finds tokens' texts. Raises InvalidRequest."""
        tools = ToolUse(body, form_of(body), config)
        form = tools.form
        sampling = sampling_of(
            body,
            form,
            max_tokens=_max_tokens(body),
            logprobs=_num_logprobs(body),
            prompt_logprobs=body.prompt_logprobs,
        )
        if tools.needs_special_tokens:
            sampling = replace(sampling, skip_special_tokens=False)
        self.names: Mapping[str, str] = NAMES if form is None else form.names
        self.request = request_of(head, body, [chat_prompt(body)], sampling)
        self._head = head
        options = body.stream_options if body.stream and body.stream_options else StreamOptions()
        self._has_usage = options.include_usage
        self._counts_on = options.include_usage and options.continuous_usage_stats
        self._has_token_ids = bool(body.return_token_ids)
        self._usage = UsageCount(max(1, self.request.n))
        # Readers are made when their choice begins, because Serving has not checked n yet.
        self._make_reader = functools.partial(ChatReader, body, tools, texts, config)
        self._has_parser = tools.parser() is not None
        self._readers: dict[int, ChatReader] = {}
        self._parts: dict[int, list[Part]] = {}
        self._fingerprint: str | UnsetType = UNSET
        self._find_texts, self._num_prompt_logprobs = texts, body.prompt_logprobs
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET

    def events(self, index: int, chunk: GenerateChunk) -> Sequence[msgspec.Struct]:
        """Return the events that a stream sends for a choice's next chunk: at least one if the chunk has tokens."""
        is_first = chunk.model_version is not None
        part = self._read(index, chunk)
        deltas = [Delta(role="assistant", content="")] if is_first else []
        deltas += map(_delta_of, part.pieces)
        if not part.pieces and self._needs_delta(part):
            # With a parser the delta has no content: "" would make the content of a message that only calls tools ""
            # instead of null.
            deltas.append(Delta() if self._has_parser else Delta(content=""))
        choices = [ChatChunkChoice(index, delta) for delta in deltas]
        if choices:
            choices[-1].logprobs = part.logprobs
            if self._has_token_ids:
                choices[-1].token_ids = part.token_ids
        if part.finish_reason is not None:
            last = ChatChunkChoice(index, Delta(), None, part.finish_reason)
            last.stop_reason = UNSET if part.stop_reason is None else part.stop_reason
            choices.append(last)
        chunks = [self._chunk([choice]) for choice in choices]
        if is_first and index == 0:
            chunks[0].prompt_token_ids, chunks[0].prompt_logprobs = self._prompt_token_ids, self._prompt_logprobs
        if self._counts_on and chunks:
            chunks[-1].usage = self._usage.usage
        return chunks

    def _needs_delta(self, part: Part) -> bool:
        """Whether a part without text needs a delta, because it has tokens, log-probabilities or ids to show."""
        if part.finish_reason is None:
            return bool(part.token_ids)
        return bool(part.logprobs or (self._has_token_ids and part.token_ids))

    def last_events(self) -> list[msgspec.Struct]:
        """Return the events that a stream sends at its end: the usage, if it was asked for."""
        if not self._has_usage:
            return []
        chunk = self._chunk([])
        chunk.usage = self._usage.usage
        return [chunk]

    def add(self, index: int, chunk: GenerateChunk) -> None:
        """Keep a choice's next chunk for whole()."""
        self._parts.setdefault(index, []).append(self._read(index, chunk))

    def whole(self) -> ChatCompletion:
        """Return the whole answer, of all chunks that were added."""
        head = self._head
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(index, parts) for index, parts in sorted(self._parts.items())],
            usage=self._usage.usage,
            system_fingerprint=self._fingerprint,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _read(self, index: int, chunk: GenerateChunk) -> Part:
        self._usage.add(index, chunk)
        if chunk.model_version is not None:
            self._fingerprint = f"model-{chunk.model_version}"
            self._learn_of_prompt(chunk, chunk.model_version)
        if (reader := self._readers.get(index)) is None:
            reader = self._readers[index] = self._make_reader()
        return reader.read(chunk)

    def _learn_of_prompt(self, chunk: GenerateChunk, model_version: int) -> None:
        if self._has_token_ids:
            self._prompt_token_ids = chunk.prompt_token_ids or []
        if self._num_prompt_logprobs is not None and chunk.prompt_logprobs is not None:
            texts = self._find_texts(model_version)
            self._prompt_logprobs = prompt_logprobs(chunk.prompt_logprobs, texts, self._num_prompt_logprobs)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        head = self._head
        return ChatCompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=None if self._has_usage else UNSET,
            system_fingerprint=self._fingerprint,
        )

    def _choice(self, index: int, parts: Sequence[Part]) -> ChatChoice:
        last = parts[-1]
        assert last.finish_reason is not None, "its stream has ended"
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        tokens = [token for part in logprobs for token in part.content]
        choice = ChatChoice(
            index=index,
            message=_message([piece for part in parts for piece in part.pieces]),
            logprobs=ChatLogprobs(tokens) if logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if self._has_token_ids:
            choice.token_ids = [token_id for part in parts for token_id in part.token_ids]
        return choice


class ChatReader:
    """Reads one choice: converts Serving's chunks to the parts of a message."""

    def __init__(self, body: ChatCompletionRequest, tools: ToolUse, texts: TokenTextsOf, config: HttpConfig) -> None:
        self._body = body
        self._parser = tools.parser()
        self._is_named = tools.is_named
        self._is_mistral = config.tool_parser == "mistral"
        self._find_texts = texts
        self._texts: TokenTexts | None = None
        self._num_calls = 0

    def read(self, chunk: GenerateChunk) -> Part:
        """Convert the next chunk."""
        pieces: list[Piece]
        if self._parser is None:
            pieces = [Content(chunk.text)] if chunk.text else []
        else:
            pieces = self._parser.push(chunk.text)
            if chunk.end is not None:
                pieces += self._parser.finish()
        numbered = [one for piece in pieces if (one := self._numbered(piece)) is not None]
        # The finish reason depends on whether there was a call, which is known only now.
        finish_reason = None if chunk.end is None else self._finish_reason(finish_reason_of(chunk.end.finish_reason))
        return Part(
            pieces=numbered,
            logprobs=self._logprobs(chunk),
            token_ids=chunk.token_ids,
            finish_reason=finish_reason,
            stop_reason=None if chunk.end is None else chunk.end.stop_reason,
        )

    def _numbered(self, piece: Piece) -> MessagePiece | None:
        match piece:
            case CallBegin(name):
                self._num_calls += 1
                return Call(self._num_calls - 1, self._call_id(), name)
            case CallArguments(text):
                return Arguments(self._num_calls - 1, text)
            case Reasoning() if self._body.include_reasoning is False:
                return None
            case Content() | Reasoning():
                return piece

    def _call_id(self) -> str:
        return secrets.token_hex(5)[:_MISTRAL_ID_CHARS] if self._is_mistral else f"call_{secrets.token_hex(12)}"

    def _finish_reason(self, reason: FinishReason) -> FinishReason:
        # As in OpenAI's API, "tool_calls" is not the reason if the request itself named the function.
        has_called = self._num_calls > 0 and not self._is_named
        return "tool_calls" if has_called and reason == "stop" else reason

    def _logprobs(self, chunk: GenerateChunk) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        if chunk.model_version is not None:
            self._texts = self._find_texts(chunk.model_version)
        if not chunk.logprobs:
            return None
        assert self._texts is not None, "the first chunk names the version"
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(chunk.logprobs, self._texts, num_top=self._body.top_logprobs or 0, as_ids=as_ids)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(FieldViolation("max_tokens", str(body.max_tokens), "none beside max_completion_tokens"))
    return body.max_completion_tokens


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest(FieldViolation("top_logprobs", str(body.top_logprobs), "0, or logprobs: true with it"))
    return None


def _delta_of(piece: MessagePiece) -> Delta:
    match piece:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case Call(index, call_id, name):
            function = CalledFunctionDelta("", name)
            return Delta(tool_calls=[ToolCallDelta(index, function, call_id, "function")])
        case Arguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index, CalledFunctionDelta(text))])


def _message(pieces: Sequence[MessagePiece]) -> AnswerMessage:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append(ToolCall(piece.id, CalledFunction(piece.name, "")))
        elif isinstance(piece, Arguments):
            calls[piece.index].function.arguments += piece.text
    return AnswerMessage(
        content=None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
