"""Puts one rank's worker together: model, cache, warm-up, the worker side of the connector."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.config import EngineConfig
from actors.model.loaded_runner import LoadedRunner
from actors.model.tensor_parallel.group import TensorParallelGroup
from actors.worker import Worker
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.device_kind import is_accelerator
from kv_transfer.links.control_streams import Control
from kv_transfer.params import EngineAddress
from kv_transfer.sides.rank_parts import RankParts
from kv_transfer.sides.staged_bytes import StagingSide
from kv_transfer.sides.storing_side import StoringSide
from kv_transfer.sides.worker_side import WorkerSide
from kv_transfer.stores.configured_stores import choose_stores
from kv_transfer.stores.store_copier import StoreCopier

logger = logging.getLogger(__name__)


def build_worker(
    config: EngineConfig,
    identity: EngineAddress,
    control: Control,
    on_progress: Callable[[], None],
    say: Callable[[str], None] = logger.info,
    group: TensorParallelGroup | None = None,
) -> Worker:
    """Load the model, size and allocate the cache, warm up. Blocks for as long as the weights take.

    identity: the rank's own; say: called with each phase of the start, in a few words
    group: the tensor-parallel group of this engine's ranks; None for an engine of one rank
    Raises CheckpointError, UnsupportedModel, AdapterRefused, KVCacheTooSmall, TransportUnavailable, StoreUnavailable or
    RankLost.
    """
    say("loading weights")
    loaded = LoadedRunner.load(config.model, config.cache, config.scheduler, config.parallel, group)
    if config.kv_transfer.has_stores:
        loaded.refuse_stores_without_use()
    if config.lora is not None:
        say("loading adapters")
        loaded.enable_lora(config.lora, on_progress)
    say("sizing the KV cache")
    num_blocks = loaded.determine_num_blocks()
    if group is not None:
        # Block ids mean the same on every rank.
        num_blocks = group.smallest(num_blocks)
    runner = loaded.initialize(num_blocks)
    say("warming up")
    runner.warm_up()
    runner.capture_graphs(config.model, config.scheduler.max_num_seqs, say)
    pairs = WorkerSide(
        config.kv_transfer, identity, runner.layout, runner.kv_cache, control=control, on_progress=on_progress
    )
    connector: KVConnectorWorker = RankParts(pairs, runner.layout)
    if runner.layout.is_plain:
        connector = StagingSide(connector, runner.kv_cache)
    stores = choose_stores(config.kv_transfer, is_on_gpu=is_accelerator(runner.kv_cache.device))
    if stores:
        say("opening KV stores")
        workers = [store.make_worker(runner.layout) for store in stores]
        connector = StoringSide(connector, StoreCopier(runner.kv_cache, workers, on_progress))
    return Worker(runner, connector, pairs.transport_name, pairs.pairing)
