"""Tokenizes text by fastokens, for tokenizers with which it gives the same tokens as the tokenizers library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Self, TypeVar

import fastokens  # type: ignore[import-untyped]  # it ships no types
from tokenizers import Tokenizer

_DIFFICULT: Final = (
    "",
    "Hello, world! I'll say 'twas NOT they'RE; don't. IT'Sa WE'LLb you'veX y'all'd've\u2019s",
    " begins and  ends with   spaces \t\ttabs\t and lines\n\n \r\n  \n\tlike these \n ",
    "0 12 345 6789 01234 3.14159 1,000,000 1e-9 ½ x² ٣٤٥ Ⅷ 一二三",
    "naïve nai\u0308ve e\u0301 e\u0323\u0301 \u1e69 s\u0307\u0323 ﬁ \u017f \u212a \u0130 ß ẞ ǅ Å \u212b",
    "漢字と仮名、한국어 \u1112\u1161\u11ab ไทยไม่มีวรรค हिन्दी क्षत्रिय עִבְרִית العَرَبِيّة Ελληνικά по-русски",
    "👩\u200d👩\u200d👧\u200d👦 🇨🇭🇺🇳 ☺\ufe0f👍🏽 \U0001fae8\U0010ffff\ue000\ufffd",
    "\x00\x01\x1c\x1f\x7f\x85\xa0\xad \u1680\u180e\u2003\u2028\u2029\u200b\u202f\u2060\u3000\ufeff",
    "a!\nb;\n\nc)\r\n.../\n{\n\t}\n};\n//x\n\n--/\n...\n/x ---\n\n/y ,\n//z",
    "def f(x: int) -> dict:\n    return {x: [1, 2.5], '_y__z': \"…\"}  # 1/2\n\n\nif __name__ == '__main__':\n\tf(3)",
    "https://user@a-b.example:8080/c/d.html?e=f&g=%20#h  C:\\Temp\\x.txt  a/b/c ... !!! ---- ==== (((([[{{<<>>}}]]))))",
    "x" * 700 + " " * 700 + "\n" * 70 + "12" * 350 + "é" * 70 + "!?" * 70,
)
_CHARACTERS_APART: Final = 211
"""The distance of the characters of Unicode that are compared."""
_TOGETHER: Final = 64
_NUM_WORDS: Final = 1000
"""How many tokens, from all parts of the vocabulary, are compared."""
_LONG_CHARS: Final = 20_000
"""The length of long texts to compare. fastokens 0.1 splits texts longer than 16 384 bytes, to use several threads."""
# Each thread that encodes caches words, in up to 100 MiB, and keeps the buffers of the longest text that it has read.
# They are freed only when the thread ends, and a thread that fastokens starts never ends: so it must start none.
os.environ["FASTOKENS_BPE_THREADS"] = "1"
# The threads of the tokenizers library; by default it starts as many as there are cores.
os.environ.setdefault("RAYON_NUM_THREADS", "2")
_alike: Final[set[bytes]] = set()
"""Digests of the tokenizers with which fastokens was compared in this process, and gave the same tokens."""

_T = TypeVar("_T")


class NoFastEncoderError(Exception):
    """fastokens cannot be used for this tokenizer."""


class FastEncoder:
    """Encodes in about a tenth of the time that the tokenizers library needs. Several threads may use it at once.

    fastokens (github.com/crusoecloud/fastokens, Apache 2.0) is another implementation of BPE, which reads
    tokenizer.json; docs/decisions/0030-prompts-are-encoded-by-fastokens.md says why its tokens are compared.
    """

    def __init__(self, encoder: fastokens.Tokenizer, reference: Tokenizer) -> None:
        self._encoder = encoder
        self._reference = reference

    @classmethod
    def of(cls, reference: Tokenizer) -> Self:
        """Make an encoder for a tokenizer, and check that both give the same tokens, which takes a tenth of a second.

        Raises NoFastEncoderError if they do not.
        """
        description = reference.to_str()
        try:
            made = cls(fastokens.Tokenizer.from_json_str(description), reference)
        # fastokens raises errors of several types; each of them means that fastokens cannot be used.
        except Exception as exc:
            raise NoFastEncoderError(f"fastokens does not support it: {exc}") from exc
        digest = hashlib.sha256(description.encode()).digest()
        if digest not in _alike:
            made._compare()
            _alike.add(digest)
        return made

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text."""
        try:
            token_ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception:  # fastokens may have a limit that the tokenizers library does not have.
            return encode_exactly(self._reference, text, add_special_tokens=add_special_tokens)
        return token_ids

    def _compare(self) -> None:
        for adds in (False, True):
            for text in _DIFFICULT if adds else _trial_texts(self._reference):
                try:
                    expected = encode_exactly(self._reference, text, add_special_tokens=adds)
                except Exception as exc:  # The tokenizers library has no error classes of its own.
                    raise NoFastEncoderError(f"the tokenizers library itself fails at {text[:200]!r}: {exc}") from exc
                if self.encode(text, add_special_tokens=adds) != expected:
                    raise NoFastEncoderError(f"fastokens makes other tokens of {text[:200]!r}")


def encode_exactly(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenize a text by the tokenizers library."""
    # This is a quarter faster than encode(), because it does not find the tokens' offsets in the text.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _trial_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts on which encoders may differ: short ones of many kinds, then long ones, two with one beginning."""
    pieces = [*_DIFFICULT, *_added_tokens(tokenizer), *_vocabulary(tokenizer)]
    yield from pieces
    yield from _characters()
    long = "".join(chain.from_iterable(zip(pieces, (" ", "\n", "", "  ") * len(pieces), strict=False)))
    long *= 1 + _LONG_CHARS // len(long)
    yield long
    yield long[:_LONG_CHARS] + "   "
    yield long[:_LONG_CHARS] + "    and so on"


def _added_tokens(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts with the added tokens, such as <s>, which tokenizers look for before all others."""
    for token in tokenizer.get_added_tokens_decoder().values():
        name = token.content
        yield f"{name}one{name}{name} two  {name}  three\n{name}\nfour{name[:-1]} {name.upper()} {name[1:]}"


def _vocabulary(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of tokens from the vocabulary: one token a line; side by side without spaces; and their spellings.

    A spelling such as <0x41> is a text like any other, and not the token.
    """
    size = tokenizer.get_vocab_size()
    sample = range(0, size, 1 + size // _NUM_WORDS)
    words = [tokenizer.decode([number], skip_special_tokens=False) for number in sample]
    for some in _grouped(words, _TOGETHER):
        yield "\n".join(some)
    for some in _grouped(sorted(words, key=lambda word: word[::-1]), _TOGETHER):
        yield "".join(word if number % 4 else word.strip() for number, word in enumerate(some))
    for some in _grouped([tokenizer.id_to_token(number) or "" for number in sample], _TOGETHER):
        yield " ".join(some)


def _characters() -> Iterator[str]:
    no_surrogates = chain(range(0xD800), range(0xE000, 0x110000))
    sample = [chr(number) for number in no_surrogates if number % _CHARACTERS_APART == 0]
    for characters in _grouped(sample, _TOGETHER):
        yield "".join(f"a{character} 1{character}{character} " for character in characters)


def _grouped(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
