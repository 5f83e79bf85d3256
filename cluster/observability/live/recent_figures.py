"""Figures over the last minute of requests that have ended."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from cluster.routing.request_record import RequestRecord

WINDOW_S: Final = 60.0
_MAX_REQUESTS: Final = 20_000
_GOOD_ENDS: Final = frozenset({"stop", "length", "done", "cancelled", "invalid"})
"""Outcomes that are no failures of the cluster; the last two are the client's own doing."""


class RecentFigures(msgspec.Struct, frozen=True):
    """The requests that have ended within the last minute, at one ingress.

    window_s:  the seconds that the figures are about: a minute, or less since the figures began
    ttft_*_s:  the median and the 99 % quantile of the times to the first token; None if no request had one
    """

    window_s: float
    num_requests: int
    requests_per_s: float
    output_tokens_per_s: float
    num_failed: int
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None


class RecentRequests:
    """The requests that have ended within the last minute; of very many the newest ones."""

    def __init__(self, now_s: float) -> None:
        """Begin without requests. now_s: Unix time"""
        self._ended: deque[tuple[float, int, bool, float | None]] = deque(maxlen=_MAX_REQUESTS)
        self._began_s = now_s - WINDOW_S

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended."""
        ended_s = record.arrived_at_s + (record.duration_s or 0.0)
        has_failed = record.outcome not in _GOOD_ENDS
        self._ended.append((ended_s, record.num_output_tokens, has_failed, record.ttft_s))

    def figures(self, now_s: float) -> RecentFigures:
        """Return the figures. now_s: Unix time"""
        while self._ended and self._ended[0][0] < now_s - WINDOW_S:
            self._ended.popleft()
        window_s = min(WINDOW_S, max(1.0, now_s - self._began_s))
        ttfts = sorted(ttft_s for _, _, _, ttft_s in self._ended if ttft_s is not None)
        return RecentFigures(
            window_s,
            len(self._ended),
            len(self._ended) / window_s,
            sum(num_tokens for _, num_tokens, _, _ in self._ended) / window_s,
            sum(has_failed for _, _, has_failed, _ in self._ended),
            ttfts[len(ttfts) // 2] if ttfts else None,
            ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)] if ttfts else None,
        )
