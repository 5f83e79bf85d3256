"""Makes prompts of exact lengths. A prompt depends on the seed and the request's number only, not on other prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from tokenizers import Tokenizer

from cluster.bench.arrivals import PlannedRequest
from cluster.errors import InvalidConfig
from cluster.traces.trace_request import BLOCK_TOKENS

_TokenT = TypeVar("_TokenT", int, str)
MIN_TOKENS: Final = 16
"""The smallest vocabulary that prompts are drawn from; with fewer tokens, prompts would be too much alike."""
_SPACE_MARKS: Final = ("\u0120", "\u2581", " ")
"""How tokenizers spell the space before a word: GPT-2's byte-level ones, SentencePiece, others."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that prompts are drawn from.

    token_ids: ids of tokens that are no special ones
    words:     words that are one token each when a space stands before them
    """

    token_ids: Sequence[int] = ()
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The tokens with which prompts begin. num_prefixes: how many different prefixes there are, used in turns"""

    num_tokens: int = 0
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Draws prompts. Two sources with the same seed draw the same ones; with different seeds, prompts share nothing."""

    vocabulary: Vocabulary
    seed: int
    prefix: SharedPrefix = field(default_factory=SharedPrefix)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """Return the prompt of a request: the shared prefix, and then as many tokens as the request has."""
        return self._draw(self.vocabulary.token_ids, request)

    def text(self, request: PlannedRequest) -> str:
        """Return a prompt of words, one token each; the first word has no space before it and may be more tokens."""
        return " ".join(self._draw(self.vocabulary.words, request))

    def _draw(self, tokens: Sequence[_TokenT], request: PlannedRequest) -> list[_TokenT]:
        prompt: list[_TokenT] = []
        if self.prefix.num_tokens:
            number = request.index % self.prefix.num_prefixes
            prompt = self._tokens(tokens, f"prefix {number}", self.prefix.num_tokens)
        if not request.blocks:
            return prompt + self._tokens(tokens, f"request {request.index}", request.num_input_tokens)
        blocks = [token for block in request.blocks for token in self._tokens(tokens, f"block {block}", BLOCK_TOKENS)]
        return prompt + blocks[: request.num_input_tokens]

    def _tokens(self, tokens: Sequence[_TokenT], name: str, count: int) -> list[_TokenT]:
        return random.Random(f"{self.seed} {name}").choices(tokens, k=count)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a tokenizer. path: a tokenizer.json, or the folder that has one. Raises InvalidConfig."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises a bare Exception.
        raise InvalidConfig("--tokenizer", [f"{file} cannot be read as a tokenizer.json: {error}"]) from error
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    spellings = {spelling: id_ for spelling, id_ in tokenizer.get_vocab().items() if id_ not in special}
    return checked(Vocabulary(sorted(spellings.values()), words_among(sorted(spellings))), "--tokenizer")


def words_among(spellings: Sequence[str]) -> list[str]:
    """Return the words among a tokenizer's tokens: a space and then at least two letters of the Latin alphabet."""
    words = {spelling[1:] for spelling in spellings if spelling[:1] in _SPACE_MARKS}
    return sorted(word for word in words if len(word) > 1 and word.isascii() and word.isalpha())


def checked(vocabulary: Vocabulary, source: str) -> Vocabulary:
    """Return the vocabulary. Raises InvalidConfig if it is too small to draw prompts from."""
    if len(vocabulary.token_ids) < MIN_TOKENS:
        shown = f"it gives {len(vocabulary.token_ids)} tokens to draw prompts from; at least {MIN_TOKENS} are needed"
        raise InvalidConfig(source, [shown])
    return vocabulary
