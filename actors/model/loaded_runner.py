"""A model runner before it has a KV cache: loads the model, finds out how many blocks fit, and makes the runner.

LoadedRunner.load(...) -> enable_lora(), if configured -> determine_num_blocks() -> initialize(n), a ModelRunner
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.choice import choose_backend, fastest_key_order
from actors.model.attention.probe import GeometryProbe
from actors.model.cache.kv_cache import allocate_kv_cache, make_layout
from actors.model.cache.kv_cache_size import check_fits, choose_num_blocks, num_useful_blocks
from actors.model.cache.memory import free_memory_bytes, peak_memory_bytes
from actors.model.config.config_rules import NO_DRAFTS_WITH_STATES
from actors.model.config.setting_rules import NO_STORES_WITH_STATES
from actors.model.errors import UnsupportedModel
from actors.model.input_batch import InputBatch
from actors.model.loader import LoadedModel, load_model
from actors.model.lora.store import AdapterStore
from actors.model.model_runner import ModelRunner
from actors.model.norms.fused_rms_norm import fuse_rms_norms
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow
from actors.model.spec_decode.configured_proposer import make_proposer
from actors.model.spec_decode.draft_model import DraftModel, load_draft_model
from actors.model.states.step_states import with_states
from actors.model.step_threads import StepThreads, num_usable_cores
from actors.model.tensor_parallel.group import TensorParallelGroup
from kv_transfer.device_kind import is_accelerator
from kv_transfer.layout import KeyOrder, KVCacheLayout

logger = logging.getLogger(__name__)


class LoadedRunner:
    """Holds one rank's model while its KV cache is sized. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        *,
        is_first_rank: bool = True,
        draft_model: DraftModel | None = None,
        graph_memory_bytes: int = 0,
    ) -> None:
        """Begin with a loaded model.

        draft_model: drafts tokens; None on other ranks than the first, and if the settings name no draft model
        graph_memory_bytes: kept free on a GPU for the graphs of decode steps
        """
        self.model = model
        self._cache_config = cache_config
        self._scheduler_config = scheduler_config
        self._is_first_rank = is_first_rank
        self._draft_model = draft_model
        self._graph_memory_bytes = graph_memory_bytes if is_accelerator(model.device) else 0
        self._adapters: AdapterStore | None = None

    @classmethod
    def load(
        cls,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
        group: TensorParallelGroup | None = None,
    ) -> LoadedRunner:
        """Load and check the model, and the draft model on the first rank.

        group: the ranks that share the model; None if this rank is the only one
        Raises CheckpointError, UnsupportedModel or RankLost.
        """
        if parallel_config.num_threads:
            torch.set_num_threads(parallel_config.num_threads)
        model = load_model(model_config, group)
        if model.geometry.state is not None and scheduler_config.speculative is not None:
            raise UnsupportedModel(model.architecture, NO_DRAFTS_WITH_STATES)
        # One rank's drafts are enough: the scheduler gives them to all.
        is_first_rank = group is None or group.rank == 0
        draft_model = load_draft_model(model_config, scheduler_config, model) if is_first_rank else None
        graph_memory_gib = 0.0 if model_config.enforce_eager else model_config.cuda_graph_memory_gib
        return cls(
            model,
            cache_config,
            scheduler_config,
            is_first_rank=is_first_rank,
            draft_model=draft_model,
            graph_memory_bytes=int(graph_memory_gib * (1 << 30)),
        )

    def refuse_stores_without_use(self) -> None:
        """Raise UnsupportedModel if no request could use what KV stores keep."""
        if self.model.geometry.state is not None:
            raise UnsupportedModel(self.model.architecture, NO_STORES_WITH_STATES)

    def enable_lora(self, config: LoraConfig, on_ready: Callable[[], None]) -> None:
        """Take requests with adapters, and load the configured adapters.

        The adapters' slots take memory, so call this before determine_num_blocks().

        on_ready: called on another thread when a step is due because an adapter was loaded
        Raises AdapterRefused, or UnsupportedModel for a model that does not generate.
        """
        if not self.model.forward.generates:
            raise UnsupportedModel(self.model.architecture, "adapters are for models that generate (unset lora)")
        if self.model.geometry.state is not None:
            # An adapter's rows are those of the flattened batch, and recurrent modules compute parts of it.
            raise UnsupportedModel(
                self.model.architecture, "adapters are not served with models that keep recurrent states (unset lora)"
            )
        self._adapters = AdapterStore(config, self.model, self._scheduler_config.max_loras, on_ready)
        self._adapters.load_configured()

    def determine_num_blocks(self) -> int:
        """Return how many blocks the cache can have. Where memory decides, measure a run of the largest batch first.

        Raises KVCacheTooSmall, or KVCacheTooLarge if the settings name more than the device has free.
        """
        model, cache_config, layout = self.model, self._cache_config, self._make_layout(1)
        block_size_bytes = layout.block_size_bytes
        is_gpu = is_accelerator(model.device)
        free_bytes = free_memory_bytes(model.device)
        activation_bytes = 0
        if self._may_lack_memory(block_size_bytes, free_bytes, is_gpu=is_gpu):
            activation_bytes = peak_memory_bytes(model.device, self._run_largest_batch)
            free_bytes = free_memory_bytes(model.device)
        free_bytes -= self._graph_memory_bytes
        num_blocks = choose_num_blocks(
            cache_config,
            self._scheduler_config,
            block_size_bytes=block_size_bytes,
            max_model_len=model.max_model_len,
            free_memory_bytes=free_bytes - activation_bytes,
            is_gpu=is_gpu,
            num_threads=torch.get_num_threads(),
            num_state_blocks=layout.num_state_blocks,
        )
        check_fits(num_blocks, block_size_bytes, free_bytes)
        return num_blocks

    def _may_lack_memory(self, block_size_bytes: int, free_bytes: int, *, is_gpu: bool) -> bool:
        """Whether the size of the cache depends on how much memory a run of the largest batch takes.

        It does not where a setting names the size, nor on a CPU where all useful blocks fit into half of the memory
        that the cache may have: the run would only make the start longer.
        """
        cache_config = self._cache_config
        if cache_config.num_blocks is not None or cache_config.kv_cache_memory_gib is not None:
            return False
        if is_gpu:
            return True
        useful = num_useful_blocks(
            cache_config,
            self._scheduler_config,
            max_model_len=self.model.max_model_len,
            is_gpu=is_gpu,
            num_threads=torch.get_num_threads(),
            num_state_blocks=self._make_layout(1).num_state_blocks,
        )
        return 2 * useful * block_size_bytes > free_bytes * cache_config.memory_fraction

    def initialize(self, num_blocks: int) -> ModelRunner:
        """Allocate the KV cache and the persistent batch, and return the runner that computes with them."""
        needs = self._needs()
        choice = choose_backend(self._cache_config.attention_backend, needs)
        logger.info(
            "chose the attention backend",
            extra={"backend": choice.kind.name.value, "key_order": needs.key_order.value, "reason": choice.reason},
        )
        if choice.kind.name is BackendName.VLLM_CPU:
            fuse_rms_norms(self.model.forward.model)
        layout = self._make_layout(num_blocks, needs.key_order)
        kv_cache = allocate_kv_cache(layout, self.model.device)
        attention = with_states(choice.kind.open(kv_cache, needs), self.model.geometry)
        batch = InputBatch(
            max_num_seqs=self._scheduler_config.max_num_seqs,
            max_model_len=self.model.max_model_len,
            block_size=self._cache_config.block_size,
            num_state_blocks=layout.num_state_blocks,
        )
        proposer = make_proposer(self._scheduler_config, batch, self._draft_model) if self._is_first_rank else None
        return ModelRunner(
            self.model,
            layout,
            attention,
            batch,
            max_num_batched_tokens=self._scheduler_config.max_num_batched_tokens,
            choice=choice,
            proposer=proposer,
            adapters=self._adapters,
            threads=self._step_threads(),
        )

    def _step_threads(self) -> StepThreads:
        """Return the threads of steps; ranks of a group compute at the same time, each on a part of the cores."""
        model, num_threads = self.model, torch.get_num_threads()
        if is_accelerator(model.device) or model.geometry.tp_size > 1:
            return StepThreads(num_threads)
        return StepThreads.beside(num_threads, num_usable_cores())

    def _needs(self) -> AttentionNeeds:
        """Return what the model asks of attention. Raises AttentionBackendUnavailable if nothing serves it."""
        model, settings = self.model, self._cache_config
        needs = AttentionNeeds(model.device, model.dtype, model.geometry, settings.block_size, KeyOrder.PLAIN)
        if settings.key_order == "auto":
            return replace(needs, key_order=fastest_key_order(settings.attention_backend, needs))
        return replace(needs, key_order=KeyOrder(settings.key_order))

    def _make_layout(self, num_blocks: int, key_order: KeyOrder = KeyOrder.PLAIN) -> KVCacheLayout:
        return make_layout(
            self.model.geometry,
            num_blocks=num_blocks,
            block_size=self._cache_config.block_size,
            dtype=self.model.dtype,
            model_fingerprint=self.model.fingerprint,
            key_order=key_order,
        )

    @torch.inference_mode()
    def _run_largest_batch(self) -> None:
        """Compute as many tokens and sampled rows as a step can have, without a KV cache."""
        model, scheduler_config = self.model, self._scheduler_config
        tokens = torch.arange(scheduler_config.max_num_batched_tokens, device=model.device)
        num_drafts = 0 if (speculative := scheduler_config.speculative) is None else speculative.max_step_tokens
        num_rows = min(scheduler_config.max_num_seqs + num_drafts, len(tokens))
        logits = model.forward(
            tokens % model.vocab_size,
            tokens % model.max_model_len,
            GeometryProbe(model.architecture, finds_sharing=False),
            tokens[: num_rows + scheduler_config.max_prompt_logprobs_per_step],
        )
        if not model.forward.generates:
            return
        no_tokens = np.zeros(0, dtype=np.int64)
        # top_p takes the most memory.
        row = SamplingRow(SamplingParams(top_p=0.5), no_tokens, no_tokens, model.eos_token_ids)
        sample(logits[:num_rows], SamplingBatch.of_rows([row] * num_rows))
