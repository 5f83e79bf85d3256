"""An engine that has no places for prefixes outside it, and knows how fast it computes."""

from __future__ import annotations

from kv_transfer.prefix.prefix_sources import PrefixSources


class KnownSpeed(PrefixSources):
    """token_s: the seconds in which it computes a token; None: it does not know"""

    def __init__(self, token_s: float | None) -> None:
        super().__init__(None, None)
        self._token_s = token_s

    def compute_s(self, num_tokens: int) -> float | None:
        return None if self._token_s is None else num_tokens * self._token_s
