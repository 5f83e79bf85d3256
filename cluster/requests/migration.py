"""Migration: whether a request that has lost its blocks goes on elsewhere instead of waiting for them.

Both ways cost steps. Staying costs the wait for room, and then the computation of what has been evicted meanwhile.
Moving costs a few steps to get going, and then the transfer of what is still cached where the request was, or its
computation. An engine that moves are to must keep room for its own requests: one preempts when nothing is free, and
gets somebody else's request only if a tenth of its blocks is free after that. With that, and a bound for each request,
requests do not go back and forth.

What is known of engines is as old as their heartbeats. So what was sent to one since then counts as taken there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.errors import NoEngineAvailable
from cluster.routing.base import candidates
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineKey
from cluster.routing.pairing import find_refusal

_MAX_MIGRATIONS: Final = 3
_MIN_FREE: Final = 0.1
_MAX_WAITING: Final = 4
"""A few may just have come; if more wait, there is no room for them."""
_START_UP_STEPS: Final = 4
"""Until a moved request computes: the messages there, the reservation, READY."""
_TOKENS_PER_STEP: Final = 256
"""The least that a step brings of them, be it transferred or computed."""
_MAX_STATS_AGE_S: Final = 2.0
_STATS_DELAY_S: Final = 1.0
"""Counters may be as much older than their arrival; a request counts in them once it has blocks."""

EngineStats: TypeAlias = Mapping[EngineKey, tuple[SchedulerStats, float]]
"""The newest counters of engines, and the Unix time at which they came."""


@dataclass(frozen=True, slots=True)
class PreemptedRequest:
    """A request that waits for blocks.

    num_tokens:     prompt and output so far
    num_wait_steps: until there is room for it where it is, at most
    num_moves:      that it has behind it
    """

    num_tokens: int
    num_wait_steps: int
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that might go on with it.

    num_promised_blocks: for requests that it may not know of yet
    stats_age_s:         seconds since the rest was told
    """

    key: EngineKey
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_waiting_reqs: int
    num_promised_blocks: int = 0
    stats_age_s: float = 0.0

    def num_blocks_for(self, request: PreemptedRequest) -> int:
        """The blocks that the request takes there at once, its next token included."""
        return -(-(request.num_tokens + 1) // self.block_size)

    def free_part_after(self, request: PreemptedRequest) -> float:
        """The part of its blocks that is free beside the request; below 0 if it does not fit.

        Those that wait there come first, and are taken to be as long as it.
        """
        num_wanted_blocks = (1 + self.num_waiting_reqs) * self.num_blocks_for(request)
        return (self.num_free_blocks - self.num_promised_blocks - num_wanted_blocks) / self.num_blocks


def choose_target(request: PreemptedRequest, targets: Sequence[Target]) -> Target | None:
    """The engine with the most room, if any has enough and moving is quicker than waiting. Pure."""
    num_migration_steps = _START_UP_STEPS + request.num_tokens // _TOKENS_PER_STEP
    if request.num_moves >= _MAX_MIGRATIONS or request.num_wait_steps <= num_migration_steps:
        return None
    fit = [
        target
        for target in targets
        if target.stats_age_s <= _MAX_STATS_AGE_S
        and target.num_waiting_reqs <= _MAX_WAITING
        and target.free_part_after(request) >= _MIN_FREE
    ]
    return min(fit, key=lambda target: (-target.free_part_after(request), target.key), default=None)


@dataclass(frozen=True, slots=True)
class _Promise:
    key: EngineKey
    num_blocks: int
    at_s: float


class MigrationPlanner:
    """Finds engines for the preempted requests of one ingress. Belongs to its event loop."""

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._promises: list[_Promise] = []

    def find_target(
        self, request: PreemptedRequest, here: EngineDescriptor, engines: Sequence[EngineConnection]
    ) -> EngineConnection | None:
        """The engine that the request is to move to, and note that it takes blocks there; None if it stays.

        here: where it was preempted; engines: those that serve
        """
        now_s = self._clock()
        self._promises = [one for one in self._promises if now_s - one.at_s <= _MAX_STATS_AGE_S + _STATS_DELAY_S]
        stats = self._stats()
        others = {engine.descriptor.key: engine for engine in _others(here, engines)}
        targets = [self._target(key, *stats[key], now_s) for key in others if key in stats and stats[key][0].num_blocks]
        target = choose_target(request, targets)
        if target is None:
            return None
        self._promises.append(_Promise(target.key, target.num_blocks_for(request), now_s))
        return others[target.key]

    def _target(self, key: EngineKey, stats: SchedulerStats, at_s: float, now_s: float) -> Target:
        promised = [one.num_blocks for one in self._promises if one.key == key and one.at_s >= at_s - _STATS_DELAY_S]
        return Target(
            key=key,
            block_size=stats.block_size,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_waiting_reqs=stats.num_waiting_reqs,
            num_promised_blocks=sum(promised),
            stats_age_s=now_s - at_s,
        )


def _others(here: EngineDescriptor, engines: Sequence[EngineConnection]) -> list[EngineConnection]:
    """Engines that may decode, and that KV can travel to from here."""
    try:
        groups = candidates(engines)
    except NoEngineAvailable:
        return []
    decode = [engine for group in groups for engine in group.decode if engine.descriptor.key != here.key]
    return [engine for engine in decode if find_refusal(here, engine.descriptor) is None]
