"""Where engines run: one placement group for a cluster's slots, a bundle for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.errors import CannotPlace
from cluster.pool.reconciler import Slot


class Placement:
    """The cluster's placement group. SPREAD: on several nodes when there are several, prefill beside decode last."""

    def __init__(self, config: ClusterConfig, slots: Sequence[Slot]) -> None:
        self._config = config
        self._slots = list(slots)
        self._group: PlacementGroup | None = None

    async def reserve(self, timeout_s: float) -> None:
        """Wait for resources for every slot. Raises CannotPlace that names what is missing."""
        bundles = [self._bundle(slot) for slot in self._slots]
        self._group = placement_group(bundles, strategy="SPREAD", name="raypd-engines")
        try:
            await asyncio.wait_for(self._group.ready(), timeout_s)
        except TimeoutError as error:
            self.release()
            raise CannotPlace(
                f"no room for {len(bundles)} engines after {timeout_s:.0f} s: they need {_total(bundles)}, "
                f"the cluster has {_rounded(ray.cluster_resources())} and of that free "  # type: ignore[no-untyped-call]  # ray
                f"{_rounded(ray.available_resources())}"  # type: ignore[no-untyped-call]  # ray
            ) from error

    def strategy(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        """Puts an actor into its slot's bundle; after reserve()."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self.bundle_index(slot)
        )

    def bundle_index(self, slot: Slot) -> int:
        """Which of the group's bundles is a slot's."""
        return self._slots.index(slot)

    def release(self) -> None:
        """Give the resources back."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _bundle(self, slot: Slot) -> dict[str, float]:
        """One engine's, for all of its ranks: so they are on one node."""
        group, num_ranks = self._config.group(slot.role), self._config.num_ranks(slot.role)
        wanted = {"CPU": group.num_cpus, "GPU": group.num_gpus, **group.resources}
        # Ray refuses an empty bundle; a sliver of a CPU stands for "nothing".
        return {name: amount * num_ranks for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def _total(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _rounded(resources: dict[str, float]) -> dict[str, float]:
    """Countable resources only: memory and per-node markers say nothing here."""
    return {
        name: round(amount, 3)
        for name, amount in sorted(resources.items())
        if not name.startswith("node:") and "memory" not in name and "_group_" not in name
    }
