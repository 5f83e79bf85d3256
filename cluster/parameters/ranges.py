"""The ranges with which sampling_options.py declares parameters, each with its words for a refused client.

A range checks a value that was given, never None. NaN is in no range, because every comparison with it is false.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.settings.input_limits import InputLimits


@dataclass(frozen=True, slots=True)
class Bounds:
    """The model's and the configuration's numbers that ranges refer to."""

    vocab_size: int
    limits: InputLimits


class Range(Protocol):
    """A rule for the values of a parameter."""

    def allows(self, value: Any, bounds: Bounds) -> bool:
        """Tell whether a value, of the type that the parameter has, is allowed."""

    def allowed(self, bounds: Bounds) -> str:
        """Return in words which values are allowed."""


@dataclass(frozen=True, slots=True)
class Between:
    """Numbers from low to high. is_above: low itself is not allowed; words: replace the words "low to high" """

    low: float
    high: float
    words: str = ""
    is_above: bool = False

    def allows(self, value: float, bounds: Bounds) -> bool:
        """Return whether the value is between both ends."""
        del bounds
        return self.low <= value <= self.high and not (self.is_above and value == self.low)

    def allowed(self, bounds: Bounds) -> str:
        """Return both ends in words."""
        del bounds
        return self.words or f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class UpTo:
    """Numbers from 0 to a limit of the configuration. limit: its field of InputLimits"""

    limit: str

    def allows(self, value: int, bounds: Bounds) -> bool:
        """Return whether the value is between 0 and the limit."""
        return bool(0 <= value <= getattr(bounds.limits, self.limit))

    def allowed(self, bounds: Bounds) -> str:
        """Return both ends in words."""
        return f"0 to {getattr(bounds.limits, self.limit)}"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Collections of a bounded length. limit: the field of InputLimits with the bound; noun: a name of the entries"""

    limit: str
    noun: str
    at_least: int = 0

    def allows(self, value: Collection[object], bounds: Bounds) -> bool:
        """Return whether the number of entries is allowed."""
        return bool(self.at_least <= len(value) <= getattr(bounds.limits, self.limit))

    def allowed(self, bounds: Bounds) -> str:
        """Return both numbers in words."""
        most = getattr(bounds.limits, self.limit)
        return f"{self.at_least} to {most} {self.noun}" if self.at_least else f"at most {most} {self.noun}"


@dataclass(frozen=True, slots=True)
class NumChars:
    """Texts with a bounded number of characters each, at least 1.

    limit: the field of InputLimits with the bound; noun: a name of the texts
    may_be_blank: whether texts of spaces alone are allowed
    """

    limit: str
    noun: str
    may_be_blank: bool = True

    def allows(self, value: Collection[str], bounds: Bounds) -> bool:
        """Return whether the length of each text is allowed."""
        most = getattr(bounds.limits, self.limit)
        return all(1 <= len(text) <= most and (self.may_be_blank or text.strip()) for text in value)

    def allowed(self, bounds: Bounds) -> str:
        """Return both lengths in words."""
        words = f"{self.noun} of 1 to {getattr(bounds.limits, self.limit)} characters"
        return words if self.may_be_blank else f"{words}, not only of spaces"


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Token ids of the model's vocabulary."""

    def allows(self, value: Collection[int], bounds: Bounds) -> bool:
        """Return whether the smallest and the largest id are in the vocabulary."""
        return not value or (min(value) >= 0 and max(value) < bounds.vocab_size)

    def allowed(self, bounds: Bounds) -> str:
        """Return both ends in words."""
        return f"token ids from 0 to {bounds.vocab_size - 1}"


@dataclass(frozen=True, slots=True)
class ValuesBetween:
    """Maps whose values are from low to high."""

    low: float
    high: float

    def allows(self, value: Mapping[int, float], bounds: Bounds) -> bool:
        """Return whether each value is between both ends."""
        del bounds
        return all(self.low <= one <= self.high for one in value.values())

    def allowed(self, bounds: Bounds) -> str:
        """Return both ends in words."""
        del bounds
        return f"values from {self.low} to {self.high}"
