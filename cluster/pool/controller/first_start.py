"""The first start of a cluster: what it waits for, and what makes it fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.config import ClusterConfig
from cluster.errors import CannotPlace, CannotStart
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.reconciling.engine_slots import EngineState
from cluster.routing.engine_connection import EngineRole

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 1.0
"""The longest wait between two looks: engines send news, ingresses do not."""


class FirstStart:
    """The wait until every engine that has room has answered its canaries; the first engine that dies ends it."""

    def __init__(
        self,
        config: ClusterConfig,
        fleet: EngineFleet,
        ingresses: IngressFleet,
        wait_for_news: Callable[[float], Awaitable[None]],
    ) -> None:
        """wait_for_news: waits until an engine has changed, at most for the given number of seconds"""
        self._config = config
        self._fleet = fleet
        self._ingresses = ingresses
        self._wait_for_news = wait_for_news

    async def wait(self) -> None:
        """Wait until the engines have answered their canaries.

        Raises CannotStart if an engine dies, if no engine can serve, or after start_timeout_s seconds.
        """
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._wait_until_loaded()
                if missing := self._ingresses.missing():
                    self._fleet.progress.say(missing)
                self._fleet.may_prove.set()
                await self._wait_until_proven()
        except TimeoutError:
            what = self._ingresses.missing() or "the engines did not come up"
            raise CannotStart(f"{what}, within {self._config.start_timeout_s:g} s") from None

    async def _wait_until_loaded(self) -> None:
        """Wait until every engine that has room has loaded. Raises CannotPlace if these cannot serve alone."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + min(self._config.place_timeout_s, self._config.start_timeout_s / 2)
        while loading := [engine for engine in self._fleet if engine.ready is None]:
            self._raise_if_one_died()
            is_late = loop.time() >= give_up_s
            if is_late and all(engine.state is EngineState.PENDING for engine in loading):
                break
            await self._wait_for_news(_MAX_WAIT_S)
        roles = {engine.role for engine in self._fleet if engine.ready is not None}
        # Any one engine could serve alone. But a cluster that is to have both roles must not begin without one of them.
        needed = {EngineRole.PREFILL, EngineRole.DECODE} & {engine.role for engine in self._fleet}
        if EngineRole.BOTH not in roles and not (needed and needed <= roles):
            pending = [engine for engine in self._fleet if engine.state is EngineState.PENDING]
            reasons = "; ".join(f"{engine.engine_id}: {engine.missing()}" for engine in pending)
            raise CannotPlace(f"no room for {len(pending)} of {len(list(self._fleet))} engines: {reasons}")

    async def _wait_until_proven(self) -> None:
        while any(engine.state is EngineState.STARTING for engine in self._fleet):
            self._raise_if_one_died()
            await self._wait_for_news(_MAX_WAIT_S)
        self._raise_if_one_died()

    def _raise_if_one_died(self) -> None:
        if refusal := self._ingresses.refusal:
            raise CannotStart(refusal)
        for engine in self._fleet:
            if engine.state is EngineState.DEAD:
                raise CannotStart(self._fleet.history(engine.slot).last_error)


def warn_of_lost_stores(config: ClusterConfig) -> None:
    """Warn if KV stores cannot find what earlier clusters have stored."""
    if config.block_hash_key_file is None and any(config.engine_config(role).kv_transfer.stores for role in EngineRole):
        logger.warning(
            "KV stores find no blocks that earlier clusters have stored: without block_hash_key_file, the key of block "
            "hashes is drawn anew at each start"
        )
