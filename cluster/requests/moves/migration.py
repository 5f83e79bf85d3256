"""Decides whether a preempted request goes on at another engine instead of waiting for blocks where it is.

Both ways cost steps. A request that stays waits for room, and then computes again what has been evicted meanwhile. A
request that migrates needs a few steps to get going, and then a transfer of what is still cached at the first engine,
or the computation of it. A target has to keep room for its own requests: it preempts when no block is free, so it gets
another engine's request only if a tenth of its blocks is free afterwards. This and a limit of migrations for each
request keep requests from going back and forth.

Engines that prefer to decode come first. In the mode `cost` an engine of role `prefill` gets the request if none of
them has room: there the request has longer gaps between tokens, and takes blocks from prompts, but it goes on.

An engine's counters are as old as its last heartbeat. So blocks of requests that were sent there since then count as
taken: the load book knows them, which routing reads as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineT, candidates
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.pairing import find_refusal

_MAX_MIGRATIONS: Final = 3
_MIN_FREE: Final = 0.1
_MAX_WAITING: Final = 4
"""The largest number of waiting requests that a target may have: if more wait, the engine has no room for them."""
_START_UP_STEPS: Final = 4
"""Steps until a migrated request computes: the messages to the target, the reservation, READY."""
_TOKENS_PER_STEP: Final = 256
"""The least number of the request's tokens that one step transfers or computes."""
_MAX_STATS_AGE_S: Final = 2.0
_STATS_DELAY_S: Final = 1.0
"""Counters may have been this old when they arrived; a request counts in them once it has blocks."""

EngineStats: TypeAlias = Mapping[EngineKey, tuple[SchedulerStats, float]]
"""The newest counters of each engine, and the time at which they came, in seconds on the planner's clock."""


@dataclass(frozen=True, slots=True)
class PreemptedRequest:
    """A request that waits for blocks.

    num_tokens:     tokens of its prompt and of its output so far
    num_wait_steps: steps until its engine has room for it, at most
    num_migrations: how often the request has migrated already
    """

    num_tokens: int
    num_wait_steps: int
    num_migrations: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that might go on with a preempted request.

    num_state_blocks:    blocks that each request takes there for its recurrent state
    num_promised_blocks: blocks for requests that were sent to the engine and may not be in its counters yet
    stats_age_s:         seconds since the other numbers came
    """

    key: EngineKey
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_waiting_reqs: int
    num_state_blocks: int = 0
    num_promised_blocks: int = 0
    stats_age_s: float = 0.0

    def num_blocks_for(self, request: PreemptedRequest) -> int:
        """Return how many blocks the request takes at this engine at once, with its next token and its state."""
        return -(-(request.num_tokens + 1) // self.block_size) + self.num_state_blocks

    def free_part_after(self, request: PreemptedRequest) -> float:
        """Return the part of the engine's blocks that stays free beside the request; below 0 if it does not fit.

        The requests that wait at the engine come first, and are assumed to be as long as this request.
        """
        num_wanted_blocks = (1 + self.num_waiting_reqs) * self.num_blocks_for(request)
        return (self.num_free_blocks - self.num_promised_blocks - num_wanted_blocks) / self.num_blocks


def choose_target(request: PreemptedRequest, targets: Sequence[Target]) -> Target | None:
    """Choose the engine with the most room. None if no engine has enough, or if waiting is quicker. Pure."""
    num_migration_steps = _START_UP_STEPS + request.num_tokens // _TOKENS_PER_STEP
    if request.num_migrations >= _MAX_MIGRATIONS or request.num_wait_steps <= num_migration_steps:
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

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
        *,
        mode: RoutingMode = RoutingMode.COST,
        load_book: LoadBook | None = None,
    ) -> None:
        """Plan no migration yet.

        mode:      says which engines may go on with a request
        load_book: knows what this ingress has sent to engines since their reports; None: the planner only knows of the
                   requests that it has found engines for
        """
        self._load_book = load_book
        self._stats = stats
        self._clock = clock
        self._mode = mode
        self._promises: list[_Promise] = []

    def find_target(
        self, request: PreemptedRequest, here: EngineDescriptor, engines: Sequence[EngineT]
    ) -> EngineT | None:
        """Choose the engine that the request migrates to, and note the blocks that it takes there; None if it stays.

        here:    the engine that preempted the request
        engines: the engines that serve
        """
        now_s = self._clock()
        self._promises = [one for one in self._promises if now_s - one.at_s <= _MAX_STATS_AGE_S + _STATS_DELAY_S]
        stats = self._stats()
        for others in _in_order(here, engines, self._mode):
            known = {one.descriptor.key: one for one in others if one.descriptor.key in stats}
            targets = [self._target(key, *stats[key], now_s) for key in known if stats[key][0].num_blocks]
            if (target := choose_target(request, targets)) is not None:
                self._promises.append(_Promise(target.key, target.num_blocks_for(request), now_s))
                return known[target.key]
        return None

    def _target(self, key: EngineKey, stats: SchedulerStats, at_s: float, now_s: float) -> Target:
        promised = [one.num_blocks for one in self._promises if one.key == key and one.at_s >= at_s - _STATS_DELAY_S]
        num_sent = 0 if self._load_book is None else self._load_book.num_blocks_sent(key)
        return Target(
            key=key,
            block_size=stats.block_size,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_waiting_reqs=stats.num_waiting_reqs,
            num_state_blocks=0 if stats.load_report is None else stats.load_report.num_state_blocks,
            # The book counts a migrated request, too, once it was submitted.
            num_promised_blocks=max(sum(promised), num_sent),
            stats_age_s=now_s - at_s,
        )


def _in_order(here: EngineDescriptor, engines: Sequence[EngineT], mode: RoutingMode) -> list[list[EngineT]]:
    """Return the other engines that may go on with a request of `here`, and get KV from there: the preferred first."""
    others = [
        engine
        for engine in engines
        if engine.descriptor.key != here.key
        and engine.descriptor.role is not EngineRole.ENCODE
        and find_refusal(here, engine.descriptor) is None
    ]
    if mode is RoutingMode.AGGREGATE:
        return [others]
    if mode is RoutingMode.COST:
        return [[one for one in others if one.descriptor.role.generates is prefers] for prefers in (True, False)]
    try:
        decode = {engine.descriptor.key for group in candidates(engines) for engine in group.decode}
    except NoEngineAvailable:
        return []
    return [[engine for engine in others if engine.descriptor.key in decode]]
