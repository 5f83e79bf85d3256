"""Keeps outputs valid UTF-8 and valid JSON in two cases that the grammar compiler, xgrammar, does not check.

UTF-8: xgrammar checks only how many continuation bytes follow a character's first byte. After the first bytes E0, ED,
F0 and F4 the standard (RFC 3629, section 4) also forbids some second bytes: they would encode overlong forms,
surrogates, or numbers beyond the last character. A client that decodes such an output would see other characters than
the grammar has counted.

JSON: in strings with a given length or with some patterns, xgrammar allows unescaped control characters. In strings,
JSON (RFC 8259, section 7) allows them only as escapes. Between values it allows line ends and tabs; the mask here
allows only the line ends, LF and CR.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

_SECOND_BYTES: Final[Mapping[int, range]] = {
    0xE0: range(0xA0, 0xC0),
    0xED: range(0x80, 0xA0),
    0xF0: range(0x90, 0xC0),
    0xF4: range(0x80, 0x90),
}
_CONTROL: Final = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_CONTINUATION: Final = range(0x80, 0xC0)
_MAX_CONTINUATIONS: Final = 3


def can_be_in_text(token: bytes) -> bool:
    """Whether a token's bytes can be a part of valid UTF-8; its first and its last character may be incomplete."""
    num_cut = 0
    while num_cut < min(len(token), _MAX_CONTINUATIONS) and token[num_cut] in _CONTINUATION:
        num_cut += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(token[num_cut:], final=False)
    except UnicodeDecodeError:
        return False
    # Python's decoder refuses a surrogate at its third byte only, so the second byte is checked here.
    return all(second in _SECOND_BYTES.get(lead, _CONTINUATION) for lead, second in pairwise(token) if lead >= 0xC0)


class TokenTexts:
    """Knows which tokens may follow a token that ends with a character's first byte, and which tokens JSON can contain.

    Masks are [num_words] int32, with one bit for each token, the lowest bit first; 1 stands for an allowed token.
    json_mask: allows the tokens without control characters; the line ends LF and CR are allowed
    """

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        """tokens: the bytes of each token of the vocabulary; num_words: ceil(vocab_size / 32)."""
        self._last_bytes = np.fromiter((token[-1] if token else 0 for token in tokens), np.uint8, len(tokens))
        first_bytes = np.fromiter((token[0] if token else 0 for token in tokens), np.uint8, len(tokens))
        is_continuation = (first_bytes >= _CONTINUATION.start) & (first_bytes < _CONTINUATION.stop)
        self.json_mask = _pack(
            np.fromiter((not _CONTROL.search(token) for token in tokens), bool, len(tokens)), num_words
        )
        self._masks: dict[int, np.ndarray] = {}
        for lead, seconds in _SECOND_BYTES.items():
            is_second = (first_bytes >= seconds.start) & (first_bytes < seconds.stop)
            self._masks[lead] = _pack(is_second | ~is_continuation, num_words)

    def mask_after(self, token_id: int) -> np.ndarray | None:
        """Return the mask of tokens that may follow this token; None if UTF-8 forbids no more than the grammar does."""
        return self._masks.get(int(self._last_bytes[token_id]))


def _pack(allowed: np.ndarray, num_words: int) -> np.ndarray:
    padded = np.zeros(num_words * 32, dtype=np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
