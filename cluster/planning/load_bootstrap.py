"""Draws a load of the near future from the requests of the last hour (block bootstrap).

Runs of consecutive requests are drawn, not single ones, so that bursts and their lengths stay as they were. Their gaps
are then scaled, so that the load has the forecast work. If the forecast has another share of prompts than the hour had,
the requests come from its newest part, in which the shift shows. Equal seeds draw equal loads: candidates are compared
on the same arrivals.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from cluster.planning.engine_work import Work, WorkPrices
from cluster.planning.offered_load import OfferedRequest

RUN_LENGTH: Final = 25
"""Consecutive requests that are drawn together."""
_MIN_PART: Final = 4 * RUN_LENGTH
_SIMILAR: Final = 0.02
"""A part of the sample whose prompts have a share of the work that is so near to the nearest one fits as well."""
_MAX_GAP_FACTOR: Final = 50.0
"""A gap counts as at most so many mean gaps: an hour's pause would otherwise be the whole load."""


class DrawnLoad(msgspec.Struct, frozen=True):
    """Requests, in the order of arrival, counted from 0 seconds.

    duration_s: from the first arrival until one more would have come
    """

    requests: tuple[OfferedRequest, ...] = ()
    duration_s: float = 0.0

    @property
    def rate_per_s(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.duration_s if self.duration_s > 0 else 0.0


def draw_load(
    sample: Sequence[OfferedRequest],
    prices: WorkPrices,
    wanted: Work,
    num_requests: int,
    seed: int,
    mix: Work | None = None,
) -> DrawnLoad:
    """Draw num_requests requests that bring the wanted work; nothing if there is no sample, or no work is wanted.

    sample: requests of the last hour, in the order of arrival
    wanted: in engine-seconds per second; the rate follows the sum of prompts and outputs
    mix:    the share of prompts that the requests should have is the one of this work; None: of the wanted one. The
            high ends of two uncertain forecasts have another share than what is expected, perhaps one of a load that
            is over
    """
    if not sample or wanted.total_s <= 0 or num_requests <= 0:
        return DrawnLoad()
    draw, sample = random.Random(seed), _fitting(sample, prices, wanted if mix is None else mix)
    gaps_s = _gaps(sample)
    drawn: list[tuple[OfferedRequest, float]] = []
    while len(drawn) < num_requests:
        first = draw.randrange(len(sample))
        drawn += [(sample[at], gaps_s[at]) for at in range(first, min(first + RUN_LENGTH, len(sample)))]
    del drawn[num_requests:]
    work = prices.work_of(request for request, _ in drawn)
    duration_s = work.total_s / wanted.total_s
    scale = duration_s / sum(gap_s for _, gap_s in drawn)
    arrived_s, requests = 0.0, []
    for request, gap_s in drawn:
        requests.append(msgspec.structs.replace(request, arrived_at_s=arrived_s))
        arrived_s += scale * gap_s
    return DrawnLoad(tuple(requests), duration_s)


def _fitting(sample: Sequence[OfferedRequest], prices: WorkPrices, wanted: Work) -> Sequence[OfferedRequest]:
    """Return the longest of the newest parts of the sample in which prompts have about the wanted share of work."""
    parts = [sample]
    while len(parts[-1]) >= 2 * _MIN_PART:
        parts.append(parts[-1][len(parts[-1]) // 2 :])
    apart = [abs(_prompt_share(prices.work_of(part)) - _prompt_share(wanted)) for part in parts]
    return next(part for part, one in zip(parts, apart, strict=True) if one <= min(apart) + _SIMILAR)


def _prompt_share(work: Work) -> float:
    return work.prefill_s / work.total_s if work.total_s > 0 else 0.0


def _gaps(sample: Sequence[OfferedRequest]) -> list[float]:
    """Return the seconds from each request to the next one; the last one gets the mean."""
    gaps_s = [max(later.arrived_at_s - one.arrived_at_s, 0.0) for one, later in pairwise(sample)]
    mean_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
    if mean_s <= 0:
        return [1.0] * len(sample)
    return [min(gap_s, _MAX_GAP_FACTOR * mean_s) for gap_s in gaps_s] + [mean_s]
