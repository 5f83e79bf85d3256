"""Converts tokens to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

NUM_PRIMING_TOKENS: Final = 8
"""How many of the prompt's last tokens are used to find the text of the first output token (its leading space, say)."""
_INCOMPLETE: Final = "\ufffd"
_INVALID_PREFIX: Final = "Invalid prefix encountered"


class Detokenizer:
    """Decodes one output as it grows. A part of a character is held back until the rest comes."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        context = list(prompt_token_ids[-NUM_PRIMING_TOKENS:])
        # A DecodeStream that starts inside a character would return the whole context as new text.
        if tokenizer.decode(context, skip_special_tokens=skip_special_tokens).endswith(_INCOMPLETE):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        """Take the next token; return the text that it completes, which may be none."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as exc:
            # The library raises a bare Exception if a decoder changes text that it has returned already, as WordPiece's
            # clean-up does. That text has been sent, so decoding goes on from here.
            if not str(exc).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""
