"""Log-probabilities in OpenAI's two shapes, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from actors.core.outputs.model_runner_output import TokenLogprobs
from cluster.api.http.openai.token_text import TokenTexts
from cluster.api.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_IMPOSSIBLE: Final = -9999.0
"""OpenAI's number for what cannot be; JSON has no infinity."""


def chat_logprobs(tokens: Sequence[TokenLogprobs], texts: TokenTexts, *, num_top: int, as_ids: bool) -> ChatLogprobs:
    """Of a chat completion. as_ids: tokens are named by their ids, as vLLM does where it is asked to"""
    return ChatLogprobs([_chat_token(token, texts, num_top, as_ids) for token in tokens])


def _chat_token(token: TokenLogprobs, texts: TokenTexts, num_top: int, as_ids: bool) -> TokenLogprob:
    # The first entry is the sampled token's own; the most likely ones follow.
    pairs = list(zip(token.token_ids, map(_finite, token.logprobs), strict=True))
    (token_id, logprob), top = pairs[0], pairs[1 : 1 + num_top]
    text, data = _named(token_id, texts, as_ids)
    return TokenLogprob(text, logprob, data, [_top(top_id, value, texts, as_ids) for top_id, value in top])


def _top(token_id: int, logprob: float, texts: TokenTexts, as_ids: bool) -> TopLogprob:
    text, data = _named(token_id, texts, as_ids)
    return TopLogprob(text, logprob, data)


class CompletionLogprobsWriter:
    """Of one choice of a completion: offsets go on from chunk to chunk."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool, offset: int = 0) -> None:
        """offset: characters of the text that stand before its first token"""
        self._texts = texts
        self._as_ids = as_ids
        self._offset = offset

    def write(self, tokens: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Of the tokens that come next."""
        result = CompletionLogprobs([], [], [], [])
        for token in tokens:
            self._append(result, token, self._offset)
            self._offset += len(self._texts.text(token.token_ids[0]))
        return result

    def write_prompt(
        self, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs], text: str, num_top: int
    ) -> CompletionLogprobs:
        """Of a prompt that stands at the text's beginning. tokens: of all of its token_ids but the first"""
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
        # Tokens of the same text fall together; the token itself is among them, however unlikely it was.
        top = zip(token.token_ids[1:], logprobs[1:], strict=True)
        result.top_logprobs.append(
            {itself: logprobs[0]} | {self._name(one): value for one, value in islice(top, num_top)}
        )

    def _name(self, token_id: int) -> str:
        return _named(token_id, self._texts, self._as_ids)[0]


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        text_offset=[offset for part in parts for offset in part.text_offset],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        tokens=[token for part in parts for token in part.tokens],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
    )


def prompt_logprobs(tokens: Iterable[TokenLogprobs], texts: TokenTexts, num_top: int) -> PromptLogprobs:
    """Of a prompt, as vLLM has them. tokens: all of it but the first"""
    return [None, *({str(one): value for one, value in _ranked(token, texts, num_top)} for token in tokens)]


def _ranked(token: TokenLogprobs, texts: TokenTexts, num_top: int) -> Iterable[tuple[int, PromptLogprob]]:
    ranks = (token.rank, *range(1, num_top + 1))
    for token_id, logprob, rank in zip(token.token_ids, token.logprobs, ranks, strict=False):
        yield token_id, PromptLogprob(_finite(logprob), rank, texts.text(token_id))


def text_offsets(tokens: Iterable[Sequence[int]], text: str) -> list[int]:
    """Where each token begins, in characters of the text that the tokens are. tokens: each one's bytes

    What the text does not have, as a beginning's mark, takes no room in it. A token that begins within a character
    stands where that does.
    """
    data, position, num_begun, offsets = text.encode(), 0, 0, []
    for token in tokens:
        is_within = position < len(data) and _is_continuation(data[position])
        offsets.append(num_begun - is_within)
        expected = bytes(token)
        if not data.startswith(expected, position):
            expected = expected.removeprefix(b" ")  # that a tokenizer has put in front of the text
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
