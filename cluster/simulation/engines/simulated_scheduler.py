"""Makes the product's scheduler for a simulated engine."""

from __future__ import annotations

from collections.abc import Callable

from actors.config import CacheConfig
from actors.core.loads.transfer_parts import TransferParts
from actors.core.scheduler import Scheduler
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec
from kv_transfer.sides.scheduler_side import SchedulerSide


def scheduler_of(
    spec: EngineSpec, cluster: ClusterSpec, connector: SchedulerSide, clock: Callable[[], float]
) -> Scheduler:
    """Return the scheduler of an engine, as an engine of the cluster would have it.

    connector: its side of the handoffs; clock: the virtual one
    """
    parts = TransferParts(
        connector=connector, config=cluster.kv_transfer, kv_bytes_per_token=cluster.kv_bytes_per_token
    )
    # Steps of a cost model are those of engines that overlap; to schedule one ahead would count that twice.
    config, cache = spec.scheduler.model_copy(update={"overlap": False}), CacheConfig(block_size=spec.block_size)
    return Scheduler(config, cache, spec.num_blocks, spec.max_model_len, transfers=parts, clock=clock)
