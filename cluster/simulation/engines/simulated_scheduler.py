"""Makes the product's scheduler for a simulated engine."""

from __future__ import annotations

from collections.abc import Callable

from actors.config import CacheConfig
from actors.core.loads.transfer_parts import TransferParts
from actors.core.scheduler import Scheduler
from cluster.routing.engine_connection import EngineKey
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.sides.scheduler_side import SchedulerSide
from kv_transfer.stores.host_blocks import HostMemoryScheduler, num_slots_within
from kv_transfer.stores.store_set import StoreSet


def scheduler_of(
    key: EngineKey, spec: EngineSpec, cluster: ClusterSpec, connector: SchedulerSide, clock: Callable[[], float]
) -> Scheduler:
    """Return the scheduler of an engine, as an engine of the cluster would have it. Raises ValueError.

    key: of this incarnation of the engine; connector: its side of the handoffs; clock: the virtual one
    """
    config = cluster.kv_transfer
    fetches = PrefixFetches(
        f"{key[0]}/{key[1]}",
        spec.block_size,
        max_fetches=config.max_reserved_requests if config.prefix_fetch else 0,
        clock=clock,
    )
    parts = TransferParts(
        connector=connector,
        prefix_sources=PrefixSources(_host_tier(spec, cluster), fetches),
        config=config,
        kv_bytes_per_token=cluster.kv_bytes_per_token,
    )
    # Steps of a cost model are those of engines that overlap; to schedule one ahead would count that twice.
    scheduler, cache = spec.scheduler.model_copy(update={"overlap": False}), CacheConfig(block_size=spec.block_size)
    return Scheduler(scheduler, cache, spec.num_blocks, spec.max_model_len, transfers=parts, clock=clock)


def _host_tier(spec: EngineSpec, cluster: ClusterSpec) -> StoreSet | None:
    """Return the store of evicted blocks in the host's memory; None if there is none. Raises ValueError."""
    if not cluster.kv_transfer.cpu_cache_gib:
        return None
    num_slots = num_slots_within(cluster.kv_transfer.cpu_cache_gib, spec.block_size * cluster.kv_bytes_per_token)
    return StoreSet([HostMemoryScheduler(num_slots)])
