"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from actors.core.outputs import TokenLogprobs
from cluster.gateway.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from cluster.gateway.token_text import TokenTexts

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
            sampled = self._name(token.token_ids[0])
            logprobs = list(map(_finite, token.logprobs))
            result.text_offset.append(self._offset)
            result.token_logprobs.append(logprobs[0])
            result.tokens.append(sampled)
            # Tokens of the same text fall together; the sampled one is among them, however unlikely it was.
            top = {self._name(top_id): value for top_id, value in zip(token.token_ids[1:], logprobs[1:], strict=True)}
            result.top_logprobs.append({sampled: logprobs[0]} | top)
            self._offset += len(self._texts.text(token.token_ids[0]))
        return result

    def _name(self, token_id: int) -> str:
        return _named(token_id, self._texts, self._as_ids)[0]


def _named(token_id: int, texts: TokenTexts, as_ids: bool) -> tuple[str, list[int]]:
    text, data = texts.text_and_bytes(token_id)
    return (f"token_id:{token_id}" if as_ids else text), data


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
