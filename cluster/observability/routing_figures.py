"""Sums up how requests were routed: shares of ways, the regret of roles, errors of predictions, and aims met.

The regret of roles is the sum of the predicted costs of the chosen placements over the sum of the predicted costs of
the best placements that need no roles, both in seconds of engine time. Below 1, roles have paid; above 1, they have
cost. Both sums are the cost model's, so the regret is right up to the model's error, which is why that error is here.
Pure: the time is passed in.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

import msgspec

from cluster.routing.decision import Way
from cluster.routing.request_record import RequestRecord

WINDOW_S: Final = 300.0
_NUM_SLICES: Final = 10
_SLICE_S: Final = WINDOW_S / _NUM_SLICES

WAYS: Final = (*(way.value for way in Way), "fixed_rule")
"""The ways, and that of requests for which nothing was predicted."""

_SMALLEST_ERROR: Final = 0.01
_GROWTH: Final = 1.1
_ERROR_BOUNDS: Final = tuple(_SMALLEST_ERROR * _GROWTH**index for index in range(73))
"""The largest error of each bucket but the last: 0.01 to about 10, each 10 % above the one before."""


class RoutingTotals(msgspec.Struct, frozen=True):
    """Sums over requests. Totals of several ingresses, or of several times, can be added.

    num_by_way:      how many requests took each of WAYS, in that order
    chosen_s:        the predicted cost of the chosen placements
    without_roles_s: the predicted cost of the best placements that need no roles, of the same requests
    num_by_error:    how many requests had a time to the first token that was off by an error of each bucket
    num_with_aims:   how many requests had aims for their latencies, and were not given up by their clients
    num_met_aims:    how many of these met all of their aims
    """

    num_by_way: tuple[int, ...] = (0,) * len(WAYS)
    chosen_s: float = 0.0
    without_roles_s: float = 0.0
    num_by_error: tuple[int, ...] = (0,) * (len(_ERROR_BOUNDS) + 1)
    num_with_aims: int = 0
    num_met_aims: int = 0

    def __add__(self, other: RoutingTotals) -> RoutingTotals:
        return RoutingTotals(
            tuple(map(int.__add__, self.num_by_way, other.num_by_way)),
            self.chosen_s + other.chosen_s,
            self.without_roles_s + other.without_roles_s,
            tuple(map(int.__add__, self.num_by_error, other.num_by_error)),
            self.num_with_aims + other.num_with_aims,
            self.num_met_aims + other.num_met_aims,
        )

    @property
    def num_requests(self) -> int:
        """How many requests there were."""
        return sum(self.num_by_way)

    @property
    def regret(self) -> float | None:
        """The regret of roles; None if no cost was predicted."""
        return self.chosen_s / self.without_roles_s if self.without_roles_s > 0 else None

    @property
    def ttft_error(self) -> float | None:
        """The median of |measured / predicted - 1| of the time to the first token, to 5 %; None without predictions."""
        num_until = list(accumulate(self.num_by_error))
        if not num_until[-1]:
            return None
        bucket = bisect_left(num_until, (num_until[-1] + 1) // 2)
        # the middle of the bucket, by ratio
        return float(_ERROR_BOUNDS[min(bucket, len(_ERROR_BOUNDS) - 1)] / math.sqrt(_GROWTH))


class RoutingSummary(msgspec.Struct, frozen=True):
    """The routing of one ingress, or of all of them.

    recent:      within the last WINDOW_S seconds
    since_start: ever
    covered_s:   the seconds that `recent` is about: fewer than WINDOW_S soon after the start
    """

    recent: RoutingTotals = RoutingTotals()
    since_start: RoutingTotals = RoutingTotals()
    covered_s: float = 0.0

    def __add__(self, other: RoutingSummary) -> RoutingSummary:
        return RoutingSummary(
            self.recent + other.recent, self.since_start + other.since_start, max(self.covered_s, other.covered_s)
        )

    @property
    def window_s(self) -> float:
        """The seconds that `recent` is about."""
        return WINDOW_S

    @property
    def num_requests(self) -> int:
        """How many requests were routed recently."""
        return self.recent.num_requests

    @property
    def requests_by_way(self) -> dict[str, int]:
        """How many requests took each way recently; ways without requests are left out."""
        return {way: count for way, count in zip(WAYS, self.recent.num_by_way, strict=True) if count}

    @property
    def regret(self) -> float | None:
        """The regret of roles, recently."""
        return self.recent.regret

    @property
    def regret_since_start(self) -> float | None:
        """The regret of roles since the ingresses' start."""
        return self.since_start.regret

    @property
    def ttft_error(self) -> float | None:
        """The median error of the predicted time to the first token, recently."""
        return self.recent.ttft_error

    @property
    def aims_met(self) -> float | None:
        """The part of the requests with aims that met all of them, recently; None if no request had any."""
        recent = self.recent
        return recent.num_met_aims / recent.num_with_aims if recent.num_with_aims else None

    @property
    def goodput_per_s(self) -> float | None:
        """How many requests a second met all of their aims, recently; None if no request had any."""
        return None if self.aims_met is None else self.recent.num_met_aims / max(self.covered_s, 1.0)


NOTHING_ROUTED: Final = RoutingSummary()


def merged(summaries: Iterable[RoutingSummary]) -> RoutingSummary:
    """Add the summaries of several ingresses."""
    return sum(summaries, NOTHING_ROUTED)


class _Sums:
    """Sums of requests that are counted one by one; totals() returns them as a value."""

    def __init__(self) -> None:
        self.num_by_way = [0] * len(WAYS)
        self.chosen_s = self.without_roles_s = 0.0
        self.num_by_error = [0] * (len(_ERROR_BOUNDS) + 1)
        self.num_with_aims = self.num_met_aims = 0

    def totals(self) -> RoutingTotals:
        return RoutingTotals(
            tuple(self.num_by_way),
            self.chosen_s,
            self.without_roles_s,
            tuple(self.num_by_error),
            self.num_with_aims,
            self.num_met_aims,
        )


class RoutingFigures:
    """The sums of one ingress. add() belongs to one thread; summary() may be called from any."""

    def __init__(self) -> None:
        self._since_start = _Sums()
        self._slices: dict[int, _Sums] = {}
        self._first_s: float | None = None

    def add(self, record: RequestRecord, now_s: float) -> None:
        """Count a request that has ended, by the decision about its first attempt. now_s: on any monotonic clock"""
        if not record.attempts:
            return
        if self._first_s is None:
            self._first_s = now_s
        number = int(now_s // _SLICE_S)
        if number not in self._slices:
            kept = {one: sums for one, sums in self._slices.items() if one > number - _NUM_SLICES}
            # A new dict, because another thread may be reading this one.
            self._slices = kept | {number: _Sums()}
        decision, predicted_s = record.attempts[0].decision, record.predicted_ttft_s
        chosen = None if decision is None else decision.chosen
        way = len(WAYS) - 1 if chosen is None else WAYS.index(chosen.way)
        error = None
        if predicted_s and record.ttft_s is not None:
            error = bisect_left(_ERROR_BOUNDS, abs(record.ttft_s / predicted_s - 1))
        for sums in (self._slices[number], self._since_start):
            sums.num_by_way[way] += 1
            sums.num_with_aims += record.has_met_aims is not None
            sums.num_met_aims += record.has_met_aims is True
            if error is not None:
                sums.num_by_error[error] += 1
            if decision is not None and chosen is not None and decision.without_roles_s > 0:
                sums.chosen_s += chosen.total_s
                sums.without_roles_s += decision.without_roles_s

    def summary(self, now_s: float) -> RoutingSummary:
        """Return the sums of the last WINDOW_S seconds, give or take a tenth, and of all time. now_s: as for add()"""
        oldest = int(now_s // _SLICE_S) - _NUM_SLICES
        slices = [sums.totals() for number, sums in self._slices.copy().items() if number > oldest]
        covered_s = 0.0 if self._first_s is None else min(now_s - self._first_s, WINDOW_S)
        return RoutingSummary(sum(slices, RoutingTotals()), self._since_start.totals(), covered_s)
