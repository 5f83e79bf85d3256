"""Rules for the tokens of a request's output: tokens that are not allowed, and tokens that complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np

from actors.core.requests.sampling_params import SamplingParams


class TokenRules:
    """One request's rules, prepared for a check at every token.

    Bad words are stored by all their tokens but the last, so a check costs one look-up for each distinct length.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._allowed = params.allowed_token_ids
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for *beginning, last in params.bad_words:
            self._ends.setdefault(tuple(beginning), []).append(last)
        self._lengths = sorted({len(beginning) for beginning in self._ends})

    @classmethod
    def of(cls, params: SamplingParams) -> Self | None:
        """Return a request's rules, or None if it has none."""
        return cls(params) if params.has_token_rules else None

    @cached_property
    def allowed_token_ids(self) -> np.ndarray:
        """The only tokens that may be sampled, [n] int64; empty if all may be."""
        return np.array(self._allowed, dtype=np.int64)

    def forbidden_after(self, output_token_ids: np.ndarray) -> list[int]:
        """Return the tokens that would complete a bad word. As in vLLM, the prompt does not count."""
        forbidden: list[int] = []
        last = output_token_ids[-self._lengths[-1] :].tolist() if self._lengths and self._lengths[-1] else []
        for length in self._lengths:
            if length <= len(last):
                forbidden += self._ends.get(tuple(last[len(last) - length :]), ())
        return forbidden

    def find_breach(self, output_token_ids: Sequence[int], num_earlier: int) -> str | None:
        """Return which token from position num_earlier on breaks a rule, or None if none does."""
        token_ids = np.array(output_token_ids, dtype=np.int64)
        for position in range(num_earlier, len(token_ids)):
            token_id = int(token_ids[position])
            is_allowed = not self._allowed or token_id in self._allowed
            if not is_allowed or token_id in self.forbidden_after(token_ids[:position]):
                return f"token {token_id} is not allowed after {position} tokens"
        return None
