"""The registration of LoRA adapters. Registered adapters are part of the membership, which ingresses follow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from actors.checkpoint.adapter_files import describe_adapter
from actors.checkpoint.peft_config import AdapterRefused
from actors.core.requests.adapter import Adapter
from actors.lora_config import ADAPTER_NAME_RULE, LoraConfig, is_adapter_name
from cluster.errors import AdapterNotFound, InvalidConfig
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.journal import Journal


class AdapterRegistry:
    """The part of the controller that registers adapters; it has no state of its own, which would have to be saved."""

    def __init__(self, config: LoraConfig | None, fleet: EngineFleet, journal: Journal) -> None:
        """config: the setting lora; None if the cluster serves no adapters"""
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._lock = asyncio.Lock()

    async def begin(self) -> None:
        """Register the adapters of the setting lora. Raises InvalidConfig."""
        if self._config is None:
            return
        adapters = []
        for name, directory in self._config.adapters.items():
            adapters.append(await self._describe(name, directory, f"lora.adapters.{name}"))
        self._fleet.membership = self._fleet.membership.with_adapters(adapters)

    async def load(self, name: str, directory: str) -> str:
        """Register an adapter, or new weights for a known one, after every serving engine has loaded it.

        Requests that have begun keep the weights that they began with. Returns the digest of the weights. Raises
        InvalidConfig if the adapter cannot be used, with the engines' reasons if they refuse it.
        """
        async with self._lock:
            adapter = await self._describe(name, directory, "load adapter")
            if refusals := await self._fleet.load_adapter(adapter):
                raise InvalidConfig("load adapter", refusals)
            self._journal.add(f"load adapter {name} ({adapter.digest}) from {directory}: asked for")
            await self._publish([one for one in self._registered if one.name != name] + [adapter])
            return adapter.digest

    async def unload(self, name: str) -> None:
        """Unregister an adapter; requests that use it finish with it. Raises AdapterNotFound."""
        async with self._lock:
            if all(one.name != name for one in self._registered):
                known = [one.name for one in self._registered]
                raise AdapterNotFound("name", name, known, is_enabled=self._config is not None)
            self._journal.add(f"unload adapter {name}: asked for")
            await self._publish(one for one in self._registered if one.name != name)

    @property
    def _registered(self) -> tuple[Adapter, ...]:
        return self._fleet.membership.adapters

    async def _publish(self, adapters: Iterable[Adapter]) -> None:
        await self._fleet.publish(self._fleet.membership.with_adapters(adapters))

    async def _describe(self, name: str, directory: str, source: str) -> Adapter:
        if self._config is None:
            raise InvalidConfig(source, ["this cluster serves no adapters: its setting lora is not set"])
        if not is_adapter_name(name):
            raise InvalidConfig(source, [f"name = {name!r}; allowed: {ADAPTER_NAME_RULE}"])
        try:
            return await asyncio.to_thread(describe_adapter, name, directory, self._config)
        except AdapterRefused as refused:
            raise InvalidConfig(source, [str(refused)]) from refused
