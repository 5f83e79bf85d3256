"""Figures over the last minute of requests that have ended."""

from __future__ import annotations

import bisect
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


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended. ended_s: Unix time"""

    ended_s: float
    num_tokens: int
    has_failed: bool
    ttft_s: float | None


class RecentRequests:
    """The requests that have ended within the last minute; of very many the newest ones.

    Invariant: the sums and the sorted times are those of the requests in _ended, so that figures cost the same however
    many requests there are.
    """

    def __init__(self, now_s: float) -> None:
        """Begin without requests. now_s: Unix time"""
        self._ended: deque[_Ended] = deque()
        self._num_tokens = self._num_failed = 0
        self._ttfts_s: list[float] = []
        """In ascending order."""
        self._began_s = now_s - WINDOW_S

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended."""
        has_failed = record.outcome not in _GOOD_ENDS
        ended_s = record.arrived_at_s + (record.duration_s or 0.0)
        self._ended.append(_Ended(ended_s, record.num_output_tokens, has_failed, record.ttft_s))
        self._num_tokens += record.num_output_tokens
        self._num_failed += has_failed
        if record.ttft_s is not None:
            bisect.insort(self._ttfts_s, record.ttft_s)
        if len(self._ended) > _MAX_REQUESTS:
            self._forget_oldest()

    def figures(self, now_s: float) -> RecentFigures:
        """Return the figures. now_s: Unix time"""
        while self._ended and self._ended[0].ended_s < now_s - WINDOW_S:
            self._forget_oldest()
        window_s = min(WINDOW_S, max(1.0, now_s - self._began_s))
        ttfts_s = self._ttfts_s
        return RecentFigures(
            window_s,
            len(self._ended),
            len(self._ended) / window_s,
            self._num_tokens / window_s,
            self._num_failed,
            ttfts_s[len(ttfts_s) // 2] if ttfts_s else None,
            ttfts_s[min(len(ttfts_s) - 1, len(ttfts_s) * 99 // 100)] if ttfts_s else None,
        )

    def _forget_oldest(self) -> None:
        oldest = self._ended.popleft()
        self._num_tokens -= oldest.num_tokens
        self._num_failed -= oldest.has_failed
        if oldest.ttft_s is not None:
            del self._ttfts_s[bisect.bisect_left(self._ttfts_s, oldest.ttft_s)]
