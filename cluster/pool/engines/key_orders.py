"""The order of keys in the KV cache, which all engines of a cluster share: chosen once, when the first engines start.

Engines exchange blocks as they are, so their keys must have the same order. Attention backends differ in the order in
which they are fast. choose_key_order() is the rule; KeyOrders waits for the reports of the engines that start together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from actors.attention_report import AttentionReport
from actors.process.ray_calls import RayCallFailed
from cluster.config import ClusterConfig
from cluster.routing.engine_connection import EngineRole
from kv_transfer.layout import KeyOrder

_OTHERS_WAIT_S: Final = 5.0
"""How long the first engine that has reported waits for the others, which start with it where there is room."""


def fixed_key_order(config: ClusterConfig) -> tuple[str, str] | None:
    """Return the order of keys that the settings leave no choice about, and the reason; None if engines are asked."""
    roles = [role for role in EngineRole if config.group(role).count and role is not EngineRole.ENCODE]
    caches = [config.engine_config(role).cache for role in roles]
    if named := {cache.key_order for cache in caches} - {"auto"}:
        return min(named), "cache.key_order names it"
    if config.model.device == "cuda" or any(config.group(role).num_gpus for role in roles):
        return KeyOrder.PLAIN.value, "engines run on GPUs"
    if len({cache.block_size for cache in caches}) > 1:
        return KeyOrder.PLAIN.value, "the engines' block sizes differ"
    return None


def choose_key_order(reports: Iterable[AttentionReport]) -> tuple[str, str]:
    """Return the order of the fastest backend among the orders that every engine reads, and the reason."""
    known = [report for report in reports if report.offers]
    shared = set.intersection(*({offer.key_order for offer in report.offers} for report in known)) if known else set()
    offers = [offer for report in known for offer in report.offers if offer.key_order in shared]
    if not offers:
        return KeyOrder.PLAIN.value, "no order is read by every engine" if known else "no engine has reported"
    # The first order that a backend lists is the one in which it is fastest, and min() keeps the first of equals.
    best = min(offers, key=lambda offer: offer.rank)
    return best.key_order, f"{best.backend} is the fastest attention backend of the engines' nodes"


class KeyOrders:
    """The choice of one cluster: fixed by settings, found in running engines, or made from the first reports."""

    def __init__(self, config: ClusterConfig, say: Callable[[str], None]) -> None:
        """say: is called once with the choice, in words"""
        self._fixed = fixed_key_order(config)
        self._num_engines = sum(config.group(role).count for role in EngineRole)
        self._wait_s = min(_OTHERS_WAIT_S, config.place_timeout_s)
        self._say = say
        self._reports: dict[str, AttentionReport] = {}
        self._all_have_reported = asyncio.Event()
        self._chosen: str | None = None

    def keep(self, key_order: str) -> None:
        """Keep the order of an engine that an earlier controller has started."""
        self._chosen = key_order

    async def of_engine(self, engine_id: str, ask: Callable[[], Awaitable[AttentionReport]]) -> str:
        """Return the order for an engine that starts.

        ask: gets the engine's report; raises RayCallFailed if the engine does not answer
        Raises what ask raises.
        """
        if self._chosen is None and self._fixed is None:
            try:
                self._reports[engine_id] = await ask()
            except RayCallFailed:
                self._num_engines -= 1
                self._wake_if_complete()
                raise
            self._wake_if_complete()
            await self._wait_for_others()
        if self._chosen is None:
            self._chosen, reason = self._fixed or choose_key_order(self._reports.values())
            self._say(f"order of keys in the KV cache: {self._chosen}, since {reason}")
        return self._chosen

    def _wake_if_complete(self) -> None:
        if len(self._reports) >= self._num_engines:
            self._all_have_reported.set()

    async def _wait_for_others(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._all_have_reported.wait()
        except TimeoutError:
            # An engine that finds no room must not hold up the others; on a CPU it reads any order.
            self._all_have_reported.set()
