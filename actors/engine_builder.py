"""Puts an engine core together: model, cache, connector, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.config import EngineConfig
from actors.core.loads.embedding_transfers import Staging
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.loads.transfer_parts import TransferParts
from actors.core.queue.adapter_cache import AdapterCache
from actors.core.requests.block_hash import BlockHashKey
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import Executor, InProcessExecutor
from actors.model.grammar.manager import XGrammarManager
from actors.model.model_runner import ModelRunner
from actors.ranks.multi_rank_executor import MultiRankExecutor
from actors.ranks.process_ranks import ProcessRanks
from actors.ranks.rank_group import RankGroup, gather_ranks
from actors.ranks.rank_launcher import RankLauncher
from actors.worker_builder import build_worker
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import Control
from kv_transfer.params import EngineAddress
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.sides.scheduler_side import SchedulerSide
from kv_transfer.stores.configured_stores import ChosenStore, choose_stores
from kv_transfer.stores.store_set import StoreSet
from kv_transfer.trust.membership import Trust

logger = logging.getLogger(__name__)


def build_engine_core(
    config: EngineConfig,
    identity: EngineAddress,
    control: Control,
    on_progress: Callable[[], None],
    say: Callable[[str], None] = logger.info,
    launch_ranks: RankLauncher = ProcessRanks,
    kept_embeddings: KeptEmbeddings | None = None,
    *,
    trust: Trust,
) -> EngineCore:
    """Load the model, size and allocate the cache, warm up. Blocks for as long as the weights take.

    on_progress: called from a transfer thread when a step is due because something arrived or left
    say: called with each phase of the start, in a few words
    launch_ranks: starts the tensor-parallel ranks after the first, which is this process
    kept_embeddings: embeddings that this engine made for others, which fetch them
    trust: the secrets by which the ranks prove themselves, and the key of block hashes
    Raises CheckpointError, UnsupportedModel, KVCacheTooSmall, TransportUnavailable, StoreUnavailable or RankLost.
    """
    group: RankGroup | None = None
    if config.parallel.tensor_parallel_size == 1:
        worker = build_worker(config, identity, control, on_progress, say)
    else:
        group = gather_ranks(config, identity, control, on_progress, say, launch_ranks, trust)
        worker = group.worker
    runner = worker.runner
    if not runner.is_causal:
        config = _without_chunks(config)
    overlap = config.scheduler.overlap
    if overlap is None:
        overlap = runner.kv_cache.device.type != "cpu"
    stores = choose_stores(config.kv_transfer, is_on_gpu=runner.kv_cache.is_cuda)
    scheduler = Scheduler(
        config.scheduler.model_copy(update={"overlap": overlap}),
        config.cache,
        runner.layout.num_blocks,
        runner.max_model_len,
        structured_output=_make_grammars(config, runner, on_progress),
        worker_abilities=runner.abilities,
        adapters=_make_adapter_cache(config, runner),
        transfers=TransferParts(
            connector=SchedulerSide(config.kv_transfer, config.cache.block_size),
            prefix_sources=_make_prefix_sources(config, identity, runner.layout, stores),
            staging=_make_staging(identity, runner.layout, kept_embeddings or KeptEmbeddings()),
            config=config.kv_transfer,
        ),
        vocab_size=runner.vocab_size,
        clock=time.monotonic,
    )
    executor: Executor = InProcessExecutor(worker, overlap=overlap)
    return EngineCore(
        scheduler,
        executor if group is None else MultiRankExecutor(executor, group),
        hash_key=BlockHashKey(trust.block_hash_key),
    )


def _without_chunks(config: EngineConfig) -> EngineConfig:
    """Return the settings for a model whose tokens attend to the whole prompt.

    Its prompts are computed in one step each, and no part of a prompt's KV serves another prompt.
    """
    scheduler = config.scheduler.model_copy(update={"enable_chunked_prefill": False})
    cache = config.cache.model_copy(update={"enable_prefix_caching": False})
    return config.model_copy(update={"scheduler": scheduler, "cache": cache})


def _make_adapter_cache(config: EngineConfig, runner: ModelRunner) -> AdapterCache | None:
    if config.lora is None or runner.adapters is None:
        return None
    return AdapterCache(config.lora.max_cpu_loras, config.lora.load_timeout_s, runner.adapters.configured)


def _make_grammars(
    config: EngineConfig, runner: ModelRunner, on_progress: Callable[[], None]
) -> XGrammarManager | None:
    """Return None for a model without an end-of-sequence token, which could not end its output, or without output."""
    if not runner.eos_token_ids or not runner.generates:
        return None
    return XGrammarManager.of_checkpoint(
        config.scheduler.grammar,
        Path(config.model.model),
        vocab_size=runner.vocab_size,
        stop_token_ids=runner.eos_token_ids,
        on_ready=on_progress,
    )


def _make_prefix_sources(
    config: EngineConfig, identity: EngineAddress, layout: KVCacheLayout, stores: Sequence[ChosenStore]
) -> PrefixSources:
    """Return the stores and the fetches from other engines. Without a prefix cache the engine fetches nothing.

    Raises StoreUnavailable.
    """
    settings, name = config.kv_transfer, _name(identity)
    is_fetching = settings.prefix_fetch and config.cache.enable_prefix_caching
    max_fetches = settings.max_reserved_requests if is_fetching else 0
    fetches = PrefixFetches(name, config.cache.block_size, max_fetches=max_fetches)
    return PrefixSources(StoreSet([store.make_scheduler(layout) for store in stores]) if stores else None, fetches)


def _make_staging(identity: EngineAddress, layout: KVCacheLayout, kept_embeddings: KeptEmbeddings) -> Staging:
    return Staging(_name(identity), layout.num_kv_heads * layout.token_size_bytes, kept_embeddings)


def _name(identity: EngineAddress) -> str:
    """Return the name of this incarnation of the engine, with which the names of its fetches begin."""
    return f"{identity.engine_id}/{identity.incarnation}"
