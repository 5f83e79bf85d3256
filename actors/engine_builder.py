"""Puts an engine core together: model, cache, connector, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from actors.config import EngineConfig
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.model_runner import ModelRunner
from actors.worker import Worker
from kv_transfer.control import Control
from kv_transfer.params import EngineAddress
from kv_transfer.scheduler_connector import ConnectorScheduler
from kv_transfer.worker_connector import ConnectorWorker

logger = logging.getLogger(__name__)


def build_engine_core(
    config: EngineConfig,
    identity: EngineAddress,
    control: Control,
    on_progress: Callable[[], None],
    say: Callable[[str], None] = logger.info,
) -> EngineCore:
    """Load the model, size and allocate the cache, warm up. Blocks for as long as the weights take.

    on_progress: called from a transfer thread when a step is due because something arrived or left
    say: told what the start is busy with, in a few words
    Raises CheckpointError, UnsupportedModel, KVCacheTooSmall or TransportUnavailable.
    """
    say("loading weights")
    runner = ModelRunner(config.model, config.cache, config.scheduler, config.parallel)
    runner.load_model()
    say("sizing the KV cache")
    runner.initialize_kv_cache(runner.determine_num_blocks())
    say("warming up")
    runner.warm_up()
    connector = ConnectorWorker(
        config.kv_transfer, identity, runner.layout, runner.kv_cache, control=control, on_progress=on_progress
    )
    overlap = config.scheduler.overlap
    if overlap is None:
        overlap = runner.kv_cache.device.type != "cpu"
    scheduler = Scheduler(
        config.scheduler.model_copy(update={"overlap": overlap}),
        config.cache,
        runner.layout.num_blocks,
        runner.max_model_len,
        connector=ConnectorScheduler(config.kv_transfer, config.cache.block_size),
        load_failure_policy=config.kv_transfer.load_failure_policy,
        handoff_timeout_s=config.kv_transfer.handoff_timeout_s,
        clock=time.time,
    )
    return EngineCore(scheduler, InProcessExecutor(Worker(runner, connector), overlap=overlap))
