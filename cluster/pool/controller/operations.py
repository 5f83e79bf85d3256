"""The methods by which operators change a running cluster: `raypd scale`, `raypd drain` and so on.

An operator's command calls the AdminService of an ingress, which calls Controller.operate() with the method's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from actors.engine_profile import EngineProfile
from cluster.api.shared.admin import OperatorVerbs
from cluster.checks.model_check import find_model_mistakes
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig, UnknownNode
from cluster.pool.adapter_registry import AdapterRegistry
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.ingresses.ingress_fleet import IngressFleet
from cluster.pool.journal import Journal
from cluster.pool.models import Models
from cluster.pool.ray_objects.ray_nodes import alive_nodes
from cluster.pool.trust_calls import spread_trust
from cluster.reconciling.engine_slots import EngineState
from cluster.reconciling.reconciler import scaled_slots
from cluster.routing.engine_connection import EngineRole


class Operations(OperatorVerbs):
    """Operators' changes. Most only change what is wanted, which the controller's rounds then carry out.

    Each change has an entry in the journal.
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: Models,
        fleet: EngineFleet,
        ingresses: IngressFleet,
        journal: Journal,
        trust: ClusterTrust,
        save: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
        note_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Take no change yet.

        save:        saves the controller's state
        on_change:   begins the next round at once
        note_change: tells the planner that an operator has changed the wanted engines or a role
        """
        self._note_change = note_change
        self._config = config
        self._models = models
        self._fleet = fleet
        self._ingresses = ingresses
        self._journal = journal
        self._trust = trust
        self._save = save
        self._on_change = on_change
        self.adapters = AdapterRegistry(config.lora, fleet, journal)

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        """Set the wanted number of engines of some roles. Returns the ids of all engines that are wanted now."""
        self._fleet.wanted = scaled_slots(self._fleet.wanted, counts)
        self._note_change()
        asked = ", ".join(f"{count} {role.value}" for role, count in counts.items())
        self._journal.add(f"scale to {asked}: asked for")
        await self._changed()
        return [slot.engine_id for slot in self._fleet.wanted]

    async def drain(self, engine_id: str, *, for_good: bool = False) -> None:
        """Take an engine out of service once its requests are finished; a new one replaces it unless for_good is set.

        Raises UnknownEngine if no engine of that name serves.
        """
        engine = self._fleet.serving(engine_id)
        if for_good:
            self._note_change()
            self._fleet.wanted = [slot for slot in self._fleet.wanted if slot != engine.slot]
        await self._fleet.drain(engine, "asked for")
        await self._changed()

    async def drain_node(self, name: str) -> list[str]:
        """Take every engine on a node out of service, and start nothing on the node any more.

        name: the node's address, its hostname, or the begin of its Ray id
        Returns the ids of the engines that drain. Raises UnknownNode.
        """
        nodes = await alive_nodes()
        found = [node for node in nodes if node.is_called(name)]
        if len(found) != 1:
            raise UnknownNode(name, [str(node) for node in found or nodes])
        node = found[0]
        self._fleet.cordoned.add(node.node_id)
        self._journal.add(f"drain node {node}: asked for")
        leaving = [e for e in self._fleet if e.node_id == node.node_id and e.state is EngineState.READY]
        for engine in leaving:
            await self._fleet.drain(engine, f"its node {node} is drained")
        await self._changed()
        return [engine.engine_id for engine in leaving]

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Change an engine's role; the engine finishes the requests that it has. Raises UnknownEngine."""
        await self._fleet.set_role(self._fleet.serving(engine_id), role)
        self._note_change()

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        """Empty engines' prefix caches, as EngineFleet.reset_prefix_cache(). Raises UnknownEngine, EngineRefused."""
        return await self._fleet.reset_prefix_cache(engine_id, preempt=preempt)

    async def profile(self, engine_id: str, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Run the profiler in an engine for duration_s seconds. Raises UnknownEngine, EngineRefused."""
        return await self._fleet.serving(engine_id).profile(duration_s, with_trace=with_trace)

    async def update(self, directory: str) -> int:
        """Begin a rolling update to a checkpoint, in which one engine after the other is replaced.

        Returns the number of the new model version. Raises InvalidConfig if the checkpoint cannot be served.
        """
        model = self._config.model.model_copy(update={"model": directory})
        sizes, drafts = self._config.tensor_parallel_sizes, self._config.draft_models
        mistakes = await asyncio.to_thread(
            find_model_mistakes,
            model,
            sizes,
            drafts,
            stores=self._config.store_settings,
            block_sizes=self._config.block_sizes,
        )
        if mistakes:
            raise InvalidConfig("update", mistakes)
        version = self._models.add(directory)
        for history in self._fleet.histories.values():
            history.forgive()
        self._journal.add(f"update to model version {version}, {directory}: asked for")
        await self._changed()
        return version

    async def load_adapter(self, name: str, directory: str) -> str:
        """Register an adapter, or new weights for one, as AdapterRegistry.load(). Returns the weights' digest."""
        return await self.adapters.load(name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Unregister an adapter, so that new requests cannot name it. Raises AdapterNotFound."""
        await self.adapters.unload(name)

    async def rotate_secret(self) -> bool:
        """Replace the cluster's secret; open connections stay. Raises SecretIsInFile.

        Returns whether the older secret is refused by now: it stays accepted as long as a process does not answer.
        """
        self._trust.rotate()
        self._journal.add("replace the cluster's secret: asked for")
        await self._save()
        return await self.finish_rotation()

    async def finish_rotation(self) -> bool:
        """Give every process the newest secrets. Returns whether the older ones are refused by now."""
        is_done = await spread_trust(self.actors(), self._trust)
        if is_done:
            self._journal.add("the cluster's older secrets are refused: everybody has the new one")
            await self._save()
        return is_done

    def actors(self) -> list[Any]:
        """Return Ray's handle of every engine and ingress."""
        return [*self._fleet.actors(), *self._ingresses.actors()]

    async def _changed(self) -> None:
        await self._save()
        self._on_change()
