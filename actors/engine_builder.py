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
from actors.core.warm_up import num_wave_tokens, plan_waves, run_waves
from actors.costs.cost_file import CostIdentity
from actors.costs.cost_keeper import CostKeeper, default_directory
from actors.costs.engine_costs import EngineCosts
from actors.engine_core import EngineCore
from actors.executor import Executor, InProcessExecutor
from actors.model.device_name import device_name
from actors.model.grammar.manager import XGrammarManager
from actors.model.model_runner import ModelRunner
from actors.ranks.multi_rank_executor import MultiRankExecutor
from actors.ranks.process_ranks import ProcessRanks
from actors.ranks.rank_group import RankGroup, gather_ranks
from actors.ranks.rank_launcher import RankLauncher
from actors.recording.begin_recording import begin_recording, may_record
from actors.recording.engine_events import VERSION, EngineHeader
from actors.recording.read_clock import ReadClock
from actors.recording.recorded_scheduler import RecordedScheduler
from actors.worker_builder import build_worker
from kv_transfer.device_kind import is_accelerator
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
    trust: the secrets by which the ranks authenticate each other, and the key of block hashes
    Raises CheckpointError, UnsupportedModel, KVCacheTooSmall, TransportUnavailable, StoreUnavailable or RankLost.
    """
    group: RankGroup | None = None
    if config.parallel.tensor_parallel_size == 1:
        worker = build_worker(config, identity, control, on_progress, say)
    else:
        group = gather_ranks(config, identity, control, on_progress, say, launch_ranks, trust)
        worker = group.worker
    runner = worker.runner
    config = _fit_to_model(config, runner)
    overlap = config.scheduler.overlap
    if overlap is None:
        overlap = is_accelerator(runner.kv_cache.device)
    stores = choose_stores(config.kv_transfer, is_on_gpu=is_accelerator(runner.kv_cache.device))
    recording = may_record(config, runner.abilities)
    clock = ReadClock() if recording is not None else time.monotonic
    sources = _make_prefix_sources(config, identity, runner.layout, stores, clock=clock)
    scheduler = (Scheduler if recording is None else RecordedScheduler)(
        config.scheduler.model_copy(update={"overlap": overlap}),
        config.cache,
        runner.layout.num_blocks,
        runner.max_model_len,
        structured_output=_make_grammars(config, runner, on_progress),
        worker_abilities=runner.abilities,
        adapters=_make_adapter_cache(config, runner),
        transfers=_make_transfers(config, identity, runner.layout, sources, kept_embeddings or KeptEmbeddings()),
        vocab_size=runner.vocab_size,
        num_state_blocks=runner.layout.num_state_blocks,
        clock=clock,
    )
    if isinstance(scheduler, RecordedScheduler) and isinstance(clock, ReadClock) and recording is not None:
        header = _header_of(config, identity, scheduler, runner, trust)
        begin_recording(scheduler, recording, header, clock)
    scheduler.chunk_budget.set_aims(config.itl_s, config.ttft_s)
    scheduler.chunk_budget.set_role(config.role)
    executor: Executor = InProcessExecutor(worker, overlap=overlap)
    if group is not None:
        executor = MultiRankExecutor(executor, group)
    say("measuring steps")
    costs = _start_costs(config, identity.engine_id, runner, executor, overlap=overlap)
    return EngineCore(scheduler, executor, hash_key=BlockHashKey(trust.block_hash_key), costs=costs)


def _start_costs(
    config: EngineConfig, engine_id: str, runner: ModelRunner, executor: Executor, *, overlap: bool
) -> EngineCosts:
    """Return the step cost model, from a file or from a warm-up; it is saved from now on."""
    keeper = _cost_keeper(config, runner, engine_id)
    saved = keeper.load()
    costs = EngineCosts(saved)
    knows_both = saved is not None and saved.knows("prefill") and saved.knows("decode")
    if not knows_both and runner.generates and runner.is_causal:
        _warm_up(config, runner, executor, costs, overlap=overlap)
    costs.keep(keeper)
    return costs


def _cost_keeper(config: EngineConfig, runner: ModelRunner, engine_id: str) -> CostKeeper:
    """Return the keeper of the engine's cost model."""
    directory = config.model.step_cost_directory
    identity = CostIdentity(
        model=config.model.model[-512:],
        device=device_name(runner.kv_cache.device)[:512],
        dtype=runner.dtype,
        num_ranks=config.parallel.tensor_parallel_size,
    )
    return CostKeeper(
        default_directory() if directory is None else Path(directory) if directory else None,
        identity,
        engine_id,
        config.role,
    )


def _warm_up(
    config: EngineConfig, runner: ModelRunner, executor: Executor, costs: EngineCosts, *, overlap: bool
) -> None:
    """Run steps with a separate scheduler, so that they leave nothing in the engine's counters and cache.

    The scheduler has the cache's first blocks, as many as the largest wave needs; rank 0 zeroes them afterwards. The
    other ranks keep what was computed there, which no request reads.
    """
    block_size, settings = config.cache.block_size, config.scheduler
    num_state_blocks = runner.layout.num_state_blocks
    num_wanted = num_wave_tokens(settings) // block_size + settings.max_num_seqs * (1 + num_state_blocks) + 1
    num_blocks = min(runner.layout.num_blocks, num_wanted)
    scheduler = Scheduler(
        settings.model_copy(update={"overlap": overlap, "speculative": None}),
        config.cache.model_copy(update={"enable_kv_events": False}),
        num_blocks,
        runner.max_model_len,
        transfers=TransferParts(connector=SchedulerSide(config.kv_transfer, block_size)),
        vocab_size=runner.vocab_size,
        num_state_blocks=num_state_blocks,
        clock=time.monotonic,
    )
    core = EngineCore(scheduler, executor, hash_key=BlockHashKey.draw(), costs=costs)
    # Requests whose states find no room beside the others wait, so a part of the cache is enough for tokens.
    num_token_blocks = max(num_blocks - settings.max_num_seqs * num_state_blocks, (num_blocks - num_state_blocks) // 4)
    waves = plan_waves(settings, runner.max_model_len, num_token_blocks * block_size)
    run_waves(
        core,
        waves,
        runner.vocab_size,
        config.model.step_cost_warm_up_s,
        max_step_tokens=settings.max_num_batched_tokens,
    )
    costs.end_warm_up()
    runner.kv_cache[:num_blocks].zero_()


def _make_transfers(
    config: EngineConfig,
    identity: EngineAddress,
    layout: KVCacheLayout,
    sources: PrefixSources,
    kept_embeddings: KeptEmbeddings,
) -> TransferParts:
    return TransferParts(
        connector=SchedulerSide(config.kv_transfer, config.cache.block_size),
        prefix_sources=sources,
        staging=_make_staging(identity, layout, kept_embeddings),
        config=config.kv_transfer,
        kv_bytes_per_token=layout.total_token_size_bytes,
    )


def _fit_to_model(config: EngineConfig, runner: ModelRunner) -> EngineConfig:
    """Return the settings without what the model does not allow."""
    return config if runner.is_causal else _without_chunks(config)


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


def _header_of(
    config: EngineConfig,
    identity: EngineAddress,
    scheduler: Scheduler,
    runner: ModelRunner,
    trust: Trust,
) -> EngineHeader:
    """Return the first record of a recording of this engine's decisions."""
    return EngineHeader(
        version=VERSION,
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        scheduler=scheduler.config.model_dump(mode="json"),
        cache=config.cache.model_dump(mode="json"),
        kv_transfer=config.kv_transfer.model_dump(mode="json"),
        num_blocks=runner.layout.num_blocks,
        max_model_len=scheduler.max_model_len,
        vocab_size=runner.vocab_size,
        kv_bytes_per_token=runner.layout.total_token_size_bytes,
        abilities=tuple(sorted(ability.value for ability in runner.abilities)),
        fetch_name=_name(identity),
        max_fetches=_max_fetches(config),
        hash_key=trust.block_hash_key,
        num_state_blocks=runner.layout.num_state_blocks,
    )


def _max_fetches(config: EngineConfig) -> int:
    """Return how many fetches an engine has under way at once; without a prefix cache it fetches nothing."""
    is_fetching = config.kv_transfer.prefix_fetch and config.cache.enable_prefix_caching
    return config.kv_transfer.max_reserved_requests if is_fetching else 0


def _make_prefix_sources(
    config: EngineConfig,
    identity: EngineAddress,
    layout: KVCacheLayout,
    stores: Sequence[ChosenStore],
    *,
    clock: Callable[[], float],
) -> PrefixSources:
    """Return the stores and the fetches from other engines. Raises StoreUnavailable."""
    fetches = PrefixFetches(_name(identity), config.cache.block_size, max_fetches=_max_fetches(config), clock=clock)
    return PrefixSources(StoreSet([store.make_scheduler(layout) for store in stores]) if stores else None, fetches)


def _make_staging(identity: EngineAddress, layout: KVCacheLayout, kept_embeddings: KeptEmbeddings) -> Staging:
    return Staging(_name(identity), layout.slot_size_bytes, kept_embeddings)


def _name(identity: EngineAddress) -> str:
    """Return the name of this incarnation of the engine, with which the names of its fetches begin."""
    return f"{identity.engine_id}/{identity.incarnation}"
