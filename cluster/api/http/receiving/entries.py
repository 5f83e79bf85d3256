"""Counts the entries of a JSON text before it is parsed, in slices between which the event loop can run.

A body of 16 MiB has room for five million empty objects. To parse these takes seconds and a gigabyte, in one call that
nothing can interrupt. To count them takes milliseconds: the structural characters outside of strings are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLICE_BYTES: Final = 1 << 18
"""The bytes of a slice, which takes about a millisecond to count."""
MAX_CONTAINERS: Final = 1 << 15
"""The most lists and objects of a body. 10 000 messages, half of which call tools, have 25 000."""
MAX_TEXTS: Final = 1 << 17
"""The most strings of a body, names of fields included. 10 000 messages of one part each have 80 000."""
MAX_ENTRIES: Final = 1 << 19
"""The most entries of all lists and objects of a body, mostly a prompt's tokens. They take 20 ms to parse."""
MAX_SLOW_NUMBERS: Final = 1 << 14
"""The most numbers of a body with a fraction, an exponent or many digits. One can take a microsecond to parse."""
MAX_NUMBER_CHARS: Final = 64
"""The most characters of a number. The time to parse a number grows with the square of its length."""

_QUOTE, _COMMA, _LIST, _OBJECT, _POINT = (ord(character) for character in '",[{.')
_QUICK_DIGITS: Final = 18
_IS_DIGIT: Final = np.isin(np.arange(256), [ord(character) for character in "0123456789"])
_IS_OF_NUMBER: Final = np.isin(np.arange(256), [ord(character) for character in "0123456789+-.eE"])
_IS_EXPONENT: Final = np.isin(np.arange(256), [ord(character) for character in "eE"])


@dataclass(frozen=True, slots=True)
class EntryCounts:
    """The counts of a JSON text.

    num_containers:   lists and objects
    num_texts:        strings, names of fields included
    num_entries:      entries of all lists and objects, at most one too few for each of them
    num_slow_numbers: numbers that are slow to parse, at least; those with a fraction and many digits count twice
    longest_number:   the characters of the longest number; a number in two slices counts as two
    """

    num_containers: int = 0
    num_texts: int = 0
    num_entries: int = 0
    num_slow_numbers: int = 0
    longest_number: int = 0

    def excess(self) -> tuple[str, str] | None:
        """Return which count is too large, and how large it may be, in words for the client; None: no count is."""
        for count, most, what in (
            (self.num_containers, MAX_CONTAINERS, "lists and objects"),
            (self.num_texts, MAX_TEXTS, "strings, names of fields included"),
            (self.num_entries, MAX_ENTRIES, "entries of lists and objects"),
            (self.num_slow_numbers, MAX_SLOW_NUMBERS, "numbers with fractions, exponents or many digits"),
            (self.longest_number, MAX_NUMBER_CHARS, "characters of a number"),
        ):
            if count > most:
                return f"more than {most} {what}", f"at most {most} {what}"
        return None


def count_entries(text: bytes) -> Iterator[EntryCounts]:
    """Yield the counts so far after each slice of a JSON text. Text that is not valid JSON is counted too."""
    begin = num_quotes = num_containers = num_commas = num_slow = longest = 0
    view = memoryview(text)
    while begin < len(view):
        end = min(begin + SLICE_BYTES, len(view))
        part = bytes(view[begin:end])
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and end < len(view):
            # A slice must not end between a backslash and the character that it escapes.
            end += 1
            part = bytes(view[begin:end])
        begin = end
        if b"\\" in part:
            part = part.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        characters = np.frombuffer(part, np.uint8)
        quotes = characters == _QUOTE
        # A position is inside a string if the number of quotes before it is odd. A sum that overflows stays odd or
        # even.
        depths = np.cumsum(quotes, dtype=np.uint8) + np.uint8(num_quotes & 1)
        is_outside = (depths & 1) == 0
        num_quotes += int(np.count_nonzero(quotes))
        num_commas += int(np.count_nonzero((characters == _COMMA) & is_outside))
        num_containers += int(np.count_nonzero(((characters == _LIST) | (characters == _OBJECT)) & is_outside))
        lengths = _number_lengths(characters, is_outside)
        longest = max(longest, int(lengths.max(initial=0)))
        num_slow += int(np.count_nonzero(lengths > _QUICK_DIGITS)) + _num_fractions(characters, is_outside)
        yield EntryCounts(num_containers, (num_quotes + 1) // 2, num_commas + 1, num_slow, longest)


def _number_lengths(characters: NDArray[np.uint8], is_outside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the length of each run of characters that could be a number."""
    others = np.flatnonzero(~(_IS_OF_NUMBER[characters] & is_outside))
    lengths: NDArray[np.int64] = np.diff(others, prepend=-1, append=len(characters)) - 1
    return lengths


def _num_fractions(characters: NDArray[np.uint8], is_outside: NDArray[np.bool_]) -> int:
    """Return the number of points, and of exponents after a digit (the "e" of true and false does not count)."""
    exponents = _IS_EXPONENT[characters[1:]] & _IS_DIGIT[characters[:-1]] & is_outside[1:]
    return int(np.count_nonzero((characters == _POINT) & is_outside)) + int(np.count_nonzero(exponents))
