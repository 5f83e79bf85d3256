"""An engine's placement group: one bundle for all of the engine's ranks, which therefore are on one node.

Engines of different roles go to different nodes as far as possible: the preferred node of an engine is the one with the
fewest engines of other roles, and among these the one with the fewest engines. The preference may be ignored by Ray.
Resources and node labels are requirements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.process.ray_calls import on_thread, ray_failures
from cluster.config import ClusterConfig
from cluster.pool.ray_objects.ray_actors import find_by_name, release_group
from cluster.pool.ray_objects.ray_nodes import Node
from cluster.routing.engine_connection import EngineRole


class EnginePlacement:
    """One engine's placement group, which outlives the controller.

    While the group waits for resources, Ray's autoscaler counts it as demand.
    """

    def __init__(self, config: ClusterConfig, role: EngineRole, group: PlacementGroup) -> None:
        """Take over a group that exists already; reserve() makes one."""
        self._config = config
        self._role = role
        self._group: PlacementGroup | None = group

    @classmethod
    async def reserve(
        cls, config: ClusterConfig, role: EngineRole, name: str, node_id: str | None, avoided: Iterable[str] = ()
    ) -> Self:
        """Make the placement group; ready() waits until its resources are reserved.

        name:    of the group, unique in the Ray cluster
        node_id: Ray's id of the preferred node
        avoided: ids of nodes where the engine must not run
        """
        selector = dict(config.group(role).labels)
        if avoided:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(avoided))})"
        # There is no deadline while Ray's head is away: a group that is made after the deadline would have no owner.
        group = await on_thread(
            placement_group,
            [engine_bundle(config, role)],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            _soft_target_node_id=node_id,
            bundle_label_selector=[selector] if selector else None,
        )
        return cls(config, role, group)

    @classmethod
    async def find(cls, config: ClusterConfig, role: EngineRole, name: str) -> Self | None:
        """Return the placement group that an earlier controller has made; None if there is none of this name."""
        group = await find_by_name(get_placement_group, name)
        return None if group is None else cls(config, role, group)

    async def ready(self) -> None:
        """Wait until the resources are reserved, for as long as that takes."""
        assert self._group is not None
        with ray_failures():
            await asyncio.shield(self._group.ready())

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that puts an actor into the engine's bundle."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=0)

    def missing(self) -> str:
        """Return, in words, what the engine needs and what the Ray cluster has."""
        return (
            f"it needs {needs_of(self._config, self._role)}; the cluster has "
            f"{_rounded(ray.cluster_resources())} and of that free "  # type: ignore[no-untyped-call]  # ray
            f"{_rounded(ray.available_resources())}"  # type: ignore[no-untyped-call]  # ray
        )

    async def release(self) -> None:
        """Give the resources back."""
        group, self._group = self._group, None
        if group is not None:
            await release_group(group)


def engine_bundle(config: ClusterConfig, role: EngineRole) -> dict[str, float]:
    """Return the resources that an engine reserves, for all of its ranks."""
    group, num_ranks = config.group(role), config.num_ranks(role)
    wanted = {"CPU": group.num_cpus, "GPU": group.num_gpus, **group.resources}
    # Ray refuses an empty bundle, so an engine without needs reserves a thousandth of a CPU.
    return {name: amount * num_ranks for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def needs_of(config: ClusterConfig, role: EngineRole) -> str:
    """Return, in words, what an engine of this role needs of its node."""
    needs = f"{_rounded(engine_bundle(config, role))} on one node"
    labels = config.group(role).labels
    if not labels:
        return needs
    return f"{needs} that is labelled {', '.join(f'{name}={value}' for name, value in sorted(labels.items()))}"


def can_hold(node: Node, config: ClusterConfig, role: EngineRole) -> bool:
    """Whether an engine of this role would fit on this node if the node were empty."""
    return node.has(engine_bundle(config, role), config.group(role).labels)


def choose_node(role: EngineRole, nodes: Sequence[str], engines: Mapping[str, Sequence[EngineRole]]) -> str | None:
    """Return the id of the preferred node for the next engine of a role; None without nodes.

    nodes:   ids of the nodes on which the engine fits
    engines: the roles of the engines on each node, by the node's id
    """

    def crowd(node_id: str) -> tuple[int, int, str]:
        here = engines.get(node_id, ())
        return sum(other is not role for other in here), len(here), node_id

    return min(nodes, key=crowd, default=None)


def _rounded(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that people count, without memory and the resources that Ray adds for nodes and groups."""
    return {
        name: round(amount, 3)
        for name, amount in sorted(resources.items())
        if not name.startswith("node:") and "memory" not in name and "_group_" not in name
    }
