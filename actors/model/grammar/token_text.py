"""Keeps outputs to UTF-8 and to JSON, where the grammar compiler is content with bytes that look like it.

UTF-8: it demands that a character's first byte is followed by as many others as it says, but after four first bytes the
standard (RFC 3629, section 4) leaves out some second ones, which would be overlong forms, surrogates or beyond the last
character. Who reads such an output sees other characters than the grammar has counted.

JSON: in strings of a given length, and in those of some patterns, it allows control characters as they are. JSON (RFC
8259, section 7) has them only in escapes; as they are, the line's ends may stand between values, where the tab may too.
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
    """Whether a token's bytes can stand in UTF-8; characters may be cut at both ends."""
    num_cut = 0
    while num_cut < min(len(token), _MAX_CONTINUATIONS) and token[num_cut] in _CONTINUATION:
        num_cut += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(token[num_cut:], final=False)
    except UnicodeDecodeError:
        return False
    # Python's decoder waits for a surrogate's third byte before it refuses it.
    return all(second in _SECOND_BYTES.get(lead, _CONTINUATION) for lead, second in pairwise(token) if lead >= 0xC0)


class TokenTexts:
    """Says which tokens may follow on a token that ends with the first byte of a character, and which can be in JSON.

    json_mask: [num_words] int32, 1 for tokens without control characters, but for the line's ends
    """

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        """tokens: of the vocabulary; num_words: 32-bit words in a mask of it"""
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
        """[num_words] int32, 1 for what may follow; None if the token leaves it to the grammar."""
        return self._masks.get(int(self._last_bytes[token_id]))


def _pack(allowed: np.ndarray, num_words: int) -> np.ndarray:
    padded = np.zeros(num_words * 32, dtype=np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
