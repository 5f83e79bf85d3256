"""Writes log-probabilities in the shapes of OpenAI's two APIs, and those of prompts in vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from actors.core.outputs.model_runner_output import TokenLogprobs
from cluster.api.http.openai.logprob_texts import TokenTexts
from cluster.api.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_IMPOSSIBLE: Final = -9999.0
"""OpenAI's log-probability of an impossible token; JSON has no infinity."""


def chat_logprobs(tokens: Sequence[TokenLogprobs], texts: TokenTexts, *, num_top: int, as_ids: bool) -> ChatLogprobs:
    """Write the log-probabilities of a chat completion.

    num_top: how many of the most likely tokens to write for each position
    as_ids:  whether tokens are written as "token_id:<id>", which vLLM's return_tokens_as_token_ids asks for
    """
    return ChatLogprobs([_chat_token(token, texts, num_top, as_ids) for token in tokens])


def _chat_token(token: TokenLogprobs, texts: TokenTexts, num_top: int, as_ids: bool) -> TokenLogprob:
    # The first entry belongs to the sampled token; the most likely tokens follow.
    pairs = list(zip(token.token_ids, map(_finite, token.logprobs), strict=True))
    (token_id, logprob), top = pairs[0], pairs[1 : 1 + num_top]
    text, data = _named(token_id, texts, as_ids)
    return TokenLogprob(text, logprob, data, [_top(top_id, value, texts, as_ids) for top_id, value in top])


def _top(token_id: int, logprob: float, texts: TokenTexts, as_ids: bool) -> TopLogprob:
    text, data = _named(token_id, texts, as_ids)
    return TopLogprob(text, logprob, data)


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one choice of a completion. Offsets go on from chunk to chunk."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool, offset: int = 0) -> None:
        """Begin at an offset: the number of characters before the first token. as_ids: see chat_logprobs()"""
        self._texts = texts
        self._as_ids = as_ids
        self._offset = offset

    def write(self, tokens: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Write the log-probabilities of the next tokens."""
        result = CompletionLogprobs([], [], [], [])
        for token in tokens:
            self._append(result, token, self._offset)
            self._offset += len(self._texts.text(token.token_ids[0]))
        return result

    def write_prompt(
        self, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs], text: str, num_top: int
    ) -> CompletionLogprobs:
        """Write the log-probabilities of a prompt with which the text begins. tokens: all of token_ids but the first"""
        offset, *offsets = text_offsets([self._texts.text_and_bytes(token_id)[1] for token_id in token_ids], text)
        result = CompletionLogprobs([offset], [None], [self._name(token_ids[0])], [None])
        for token, offset in zip(tokens, offsets, strict=True):
            self._append(result, token, offset, num_top)
        return result

    def _append(
        self, result: CompletionLogprobs, token: TokenLogprobs, offset: int, num_top: int | None = None
    ) -> None:
        itself = self._name(token.token_ids[0])
        logprobs = list(map(_finite, token.logprobs))
        result.text_offset.append(offset)
        result.token_logprobs.append(logprobs[0])
        result.tokens.append(itself)
        # Tokens with the same text share an entry. The sampled token is always among the entries, however unlikely it
        # was.
        top = zip(token.token_ids[1:], logprobs[1:], strict=True)
        result.top_logprobs.append(
            {itself: logprobs[0]} | {self._name(one): value for one, value in islice(top, num_top)}
        )

    def _name(self, token_id: int) -> str:
        return _named(token_id, self._texts, self._as_ids)[0]


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Join parts, one after the other."""
    return CompletionLogprobs(
        text_offset=[offset for part in parts for offset in part.text_offset],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        tokens=[token for part in parts for token in part.tokens],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
    )


def prompt_logprobs(tokens: Iterable[TokenLogprobs], texts: TokenTexts, num_top: int) -> PromptLogprobs:
    """Write the log-probabilities of a prompt in vLLM's shape. tokens: all of the prompt's tokens but the first"""
    return [None, *({str(one): value for one, value in _ranked(token, texts, num_top)} for token in tokens)]


def _ranked(token: TokenLogprobs, texts: TokenTexts, num_top: int) -> Iterable[tuple[int, PromptLogprob]]:
    ranks = (token.rank, *range(1, num_top + 1))
    for token_id, logprob, rank in zip(token.token_ids, token.logprobs, ranks, strict=False):
        yield token_id, PromptLogprob(_finite(logprob), rank, texts.text(token_id))


def text_offsets(tokens: Iterable[Sequence[int]], text: str) -> list[int]:
    """Return where each token begins, in characters of the tokens' text. tokens: the bytes of each token

    A token that is not in the text, such as a beginning-of-sequence token, has a length of 0. A token that begins
    within a character has the offset of that character.
    """
    data, position, num_begun, offsets = text.encode(), 0, 0, []
    for token in tokens:
        is_within = position < len(data) and _is_continuation(data[position])
        offsets.append(num_begun - is_within)
        expected = bytes(token)
        if not data.startswith(expected, position):
            expected = expected.removeprefix(b" ")  # the tokenizer has put the space in front of the text
        if data.startswith(expected, position):
            num_begun += sum(not _is_continuation(byte) for byte in expected)
            position += len(expected)
    return offsets


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _named(token_id: int, texts: TokenTexts, as_ids: bool) -> tuple[str, list[int]]:
    text, data = texts.text_and_bytes(token_id)
    return (f"token_id:{token_id}" if as_ids else text), data


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
