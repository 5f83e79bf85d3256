"""One rank's model: takes the scheduler's decision for a step, computes it, samples.

load_model() -> determine_num_blocks() -> initialize_kv_cache(n) -> warm_up() -> execute_model() step by step
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.model_runner_output import NO_TOKEN, DraftTokenIds, ModelRunnerOutput, TokenLogprobs
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.abilities import Ability
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request_limits import ImageFacts
from actors.core.requests.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from actors.model.attention.base import BatchShape
from actors.model.attention.probe import GeometryProbe
from actors.model.attention.torch_backend import TorchAttention
from actors.model.cache.kv_cache import allocate_kv_cache, copy_blocks, make_layout
from actors.model.cache.kv_cache_size import check_fits, choose_num_blocks
from actors.model.cache.memory import free_memory_bytes, peak_memory_bytes
from actors.model.errors import UnsupportedModel
from actors.model.forward import TakeStates
from actors.model.grammar.mask import GrammarMask
from actors.model.input_batch import InputBatch, StepInputs
from actors.model.loader import LoadedModel, load_model
from actors.model.lora.store import AdapterStore
from actors.model.multimodal.families import image_facts
from actors.model.multimodal.image_batch import ImageBatch, encode_image, pack_embeddings
from actors.model.pooling.pooler import Pooler
from actors.model.prompt_embeds import PromptEmbedsBatch
from actors.model.sampling.prompt_logprobs import PromptParts
from actors.model.sampling.sampler import SamplerOutput, sample
from actors.model.sampling.sampling_batch import SamplingBatch, SamplingRow
from actors.model.spec_decode.choice import make_proposer
from actors.model.spec_decode.draft_model import DraftModel, load_draft_model
from actors.model.spec_decode.proposer import Proposer
from actors.model.tensor_parallel.group import TensorParallelGroup
from kv_transfer.layout import KVCacheLayout

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model, the KV cache and the persistent batch. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """group: the ranks that share the model; None if this is the only one."""
        self._group = group
        self._model_config = model_config
        self._cache_config = cache_config
        self._scheduler_config = scheduler_config
        self._parallel_config = parallel_config
        self._loaded: LoadedModel | None = None
        self._layout: KVCacheLayout | None = None
        self._attention: TorchAttention | None = None
        self._batch: InputBatch | None = None
        self._prompt_embeds: PromptEmbedsBatch | None = None
        self._draft_model: DraftModel | None = None
        self._proposer: Proposer | None = None
        self._pooler = Pooler()
        self.adapters: AdapterStore | None = None
        self._images: ImageBatch | None = None

    def load_model(self) -> None:
        """Load and check the model. Raises CheckpointError or UnsupportedModel."""
        if self._parallel_config.num_threads:
            torch.set_num_threads(self._parallel_config.num_threads)
        self._loaded = load_model(self._model_config, self._group)
        self._pooler = Pooler(self._loaded.head)
        self._prompt_embeds = PromptEmbedsBatch(self._loaded.forward.model)
        if (family := self._loaded.vision_family) is not None:
            self._images = ImageBatch(self._loaded.forward.model, has_grid_positions=family.has_grid_positions)
        # One rank's guesses are enough: the scheduler gives them to all.
        if self._group is None or self._group.rank == 0:
            self._draft_model = load_draft_model(self._model_config, self._scheduler_config, self._loaded)

    def enable_lora(self, config: LoraConfig, on_ready: Callable[[], None]) -> None:
        """Take requests with adapters, and load those that are configured; after load_model().

        on_ready: called on another thread when a step is due because an adapter was loaded
        Raises AdapterRefused, or UnsupportedModel for a model that does not generate.
        """
        if not self.generates:
            raise UnsupportedModel(self.architecture, "adapters are for models that generate (unset lora)")
        self.adapters = AdapterStore(config, self._model, self._scheduler_config.max_loras, on_ready)
        self.adapters.load_configured()

    def determine_num_blocks(self) -> int:
        """How many blocks the cache can have, after a profiling run of the largest batch where memory decides.

        Raises KVCacheTooSmall, or KVCacheTooLarge if the settings name more than the device has free.
        """
        loaded, cache_config = self._model, self._cache_config
        block_size_bytes = self._make_layout(1).block_size_bytes
        is_sized_by_memory = cache_config.num_blocks is None and cache_config.kv_cache_memory_gib is None
        activation_bytes = peak_memory_bytes(loaded.device, self._run_largest_batch) if is_sized_by_memory else 0
        free_bytes = free_memory_bytes(loaded.device)
        num_blocks = choose_num_blocks(
            cache_config,
            self._scheduler_config,
            block_size_bytes=block_size_bytes,
            max_model_len=loaded.max_model_len,
            free_memory_bytes=free_bytes - activation_bytes,
        )
        check_fits(num_blocks, block_size_bytes, free_bytes)
        return num_blocks

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache and the persistent batch."""
        loaded = self._model
        self._layout = self._make_layout(num_blocks)
        kv_cache = allocate_kv_cache(self._layout, loaded.device)
        self._attention = TorchAttention(kv_cache, loaded.geometry.sliding_windows)
        self._batch = InputBatch(
            max_num_seqs=self._scheduler_config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size=self._cache_config.block_size,
        )
        if self._group is None or self._group.rank == 0:
            self._proposer = make_proposer(self._scheduler_config, self._batch, self._draft_model)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode step once, so that no request pays for first-time work. The cache stays as it was.

        Needs the cache; call it before any request.
        """
        kv_cache = self.kv_cache
        block_size = self.layout.block_size
        num_tokens = min(self._scheduler_config.max_num_batched_tokens, block_size, self.max_model_len - 1)
        table = np.zeros((1, 1 + num_tokens // block_size), dtype=np.int64)
        for start, stop in ((0, num_tokens), (num_tokens - 1, num_tokens)):
            shape = BatchShape(np.array([0, stop - start]), np.array([start]), table)
            self._forward(np.zeros(stop - start, dtype=np.int64), np.arange(start, stop), shape, np.zeros(1, np.int64))
        kv_cache[0].zero_()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and sample where a request's last token is in it."""
        batch = self._input_batch
        batch.update(scheduler_output)
        self._embeds.update(scheduler_output)
        self._pooler.update(scheduler_output)
        if self._images is not None:
            self._images.update(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput([], [])
        if scheduler_output.block_copies:
            copy_blocks(self.kv_cache, scheduler_output.block_copies)
        req_ids = scheduler_output.batch.req_ids
        pooled = self._pooler.begin_step(scheduler_output.batch)
        take_states = None if pooled is None else pooled.take_states
        with self._embeds.in_place(scheduler_output.batch):
            inputs = batch.prepare(
                scheduler_output.batch,
                scheduler_output.scheduled_spec_decode_tokens,
                scheduler_output.num_common_prefix_blocks[0],
            )
            if self._images is not None:
                inputs = self._images.put_into(inputs, scheduler_output.batch)
            if self.adapters is not None:
                rows = scheduler_output.batch.rows
                self.adapters.begin_step(batch.lora_names[rows], scheduler_output.batch.num_new_tokens)
            if inputs.prompts is None:
                logits = self._forward_step(inputs, inputs.logits_indices, take_states)
                prompt_logprobs = None
            else:
                logits, prompt_logprobs = self._look_at_prompts(inputs, inputs.prompts, take_states)
        if len(inputs.sampled):
            output = self._sample_and_propose(scheduler_output, inputs, logits)
        else:
            output = ModelRunnerOutput(req_ids, np.full((len(req_ids), 1), NO_TOKEN, dtype=np.int64))
        output.prompt_logprobs_dict = prompt_logprobs or {}
        if pooled is not None:
            output.pooler_output = pooled.outputs()
        return output

    def _sample_and_propose(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, logits: Tensor
    ) -> ModelRunnerOutput:
        sample_tokens = self._sample if inputs.drafts is None else self._check_drafts
        output = sample_tokens(scheduler_output, inputs, logits)
        if self._proposer is not None and scheduler_output.num_drafts_wanted is not None:
            output.draft_token_ids = self._propose(self._proposer, scheduler_output, inputs.sampled)
        return output

    def _look_at_prompts(
        self, inputs: StepInputs, prompts: PromptParts, take_states: TakeStates | None
    ) -> tuple[Tensor, dict[str, list[TokenLogprobs]]]:
        """The logits to sample from, and the log-probabilities of prompts that end in the step."""
        indices = np.concatenate([inputs.logits_indices, prompts.logits_indices])
        logits = self._forward_step(inputs, indices, take_states)
        num_sampled = len(inputs.logits_indices)
        return logits[:num_sampled], self._input_batch.prompt_logprobs.take_in(prompts, logits[num_sampled:])

    def _sample(self, scheduler_output: SchedulerOutput, inputs: StepInputs, logits: Tensor) -> ModelRunnerOutput:
        """One token for each request whose last token is in the step."""
        batch, req_ids = self._input_batch, scheduler_output.batch.req_ids
        token_ids = np.full((len(req_ids), 1), NO_TOKEN, dtype=np.int64)
        grammar_mask = GrammarMask.of_step(scheduler_output, inputs.sampled)
        sampled = sample(logits, batch.sampling_batch(inputs.sampled_rows), grammar_mask)
        token_ids[inputs.sampled, 0] = sampled.token_ids
        batch.append(inputs.sampled_rows, token_ids[inputs.sampled, 0])
        return _collect(req_ids, token_ids, inputs.sampled, sampled)

    def _check_drafts(self, scheduler_output: SchedulerOutput, inputs: StepInputs, logits: Tensor) -> ModelRunnerOutput:
        """The same after each guess as well; what was guessed right is kept, and the token after it."""
        drafts, rows = inputs.drafts, inputs.sampled_rows
        assert drafts is not None
        batch, req_ids = self._input_batch, scheduler_output.batch.req_ids
        owners = inputs.sampled[drafts.owners]
        grammar_mask = GrammarMask.of_step(scheduler_output, owners)
        sampled = sample(logits, batch.sampling_batch(rows[drafts.owners], drafts.offsets), grammar_mask)
        tokens, num_tokens = drafts.accept(np.array(sampled.token_ids, dtype=np.int64))
        batch.append_several(rows, tokens, num_tokens)
        token_ids = np.full((len(req_ids), tokens.shape[1]), NO_TOKEN, dtype=np.int64)
        token_ids[inputs.sampled] = tokens
        is_kept = drafts.offsets < num_tokens[drafts.owners]
        return _collect(req_ids, token_ids, owners[is_kept], sampled.at(np.flatnonzero(is_kept)))

    @staticmethod
    def _propose(proposer: Proposer, scheduler_output: SchedulerOutput, sampled: np.ndarray) -> DraftTokenIds:
        """Guess on for those that have a new token, and of which guesses are wanted."""
        batch, num_wanted = scheduler_output.batch, scheduler_output.num_drafts_wanted
        assert num_wanted is not None
        chosen = sampled[num_wanted[sampled] > 0]
        guesses = proposer.propose(batch.rows[chosen], batch.epochs[chosen], num_wanted[chosen])
        return DraftTokenIds([batch.req_ids[index] for index in chosen.tolist()], guesses)

    @property
    def kv_cache(self) -> Tensor:
        """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]."""
        return self._backend.kv_cache

    @property
    def layout(self) -> KVCacheLayout:
        """The cache's layout, with the model's fingerprint."""
        assert self._layout is not None, "initialize_kv_cache comes first"
        return self._layout

    @property
    def abilities(self) -> frozenset[Ability]:
        """What it does for a request. Vectors come of the loaded model; the rest is this engine's."""
        facts = self.pooling
        has = {
            Ability.GENERATION: self.generates,
            Ability.HANDOFF: self.generates,
            Ability.STRUCTURED_OUTPUT: self.generates,
            Ability.MULTIMODAL: self._images is not None,
            Ability.PROMPT_LOGPROBS: self.generates,
            Ability.LORA: self.adapters is not None,
            Ability.PROMPT_EMBEDS: self.prompt_embeds_size > 0,
            Ability.POOLING: facts is not None and facts.embedding_size > 0,
            Ability.CLASSIFICATION: facts is not None and bool(facts.labels),
        }
        return frozenset(ability for ability, is_there in has.items() if is_there)

    @property
    def generates(self) -> bool:
        """Whether the model has a language head."""
        return self._model.forward.generates

    @property
    def pooling(self) -> PoolingFacts | None:
        """What vectors the model gives; None if it gives none."""
        return self._model.pooling

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens."""
        return self._model.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of the longest possible request."""
        if self.is_causal:
            return self._model.max_model_len
        return min(self._model.max_model_len, self._scheduler_config.max_num_batched_tokens)

    @property
    def is_causal(self) -> bool:
        """Whether tokens see only those before them. If not, a prompt has to be computed in one step."""
        return self._model.geometry.is_causal

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.vocab_size

    @property
    def dtype(self) -> str:
        """The dtype that the model computes in: float32, bfloat16 or float16."""
        return str(self._model.forward.model.dtype).removeprefix("torch.")

    @property
    def prompt_embeds_size(self) -> int:
        """Of one token's embedding; 0 if prompts cannot be embeddings."""
        return self._embeds.embedding_size if self.generates else 0

    @property
    def images(self) -> ImageFacts | None:
        """The limits of the model's image encoder; None if the model takes no images."""
        if self._images is None:
            return None
        return image_facts(self._model.forward.model.config, self._embeds.embedding_size)

    @property
    def architecture(self) -> str:
        """The model's class name."""
        return self._model.architecture

    @property
    def _model(self) -> LoadedModel:
        assert self._loaded is not None, "load_model comes first"
        return self._loaded

    @property
    def _backend(self) -> TorchAttention:
        assert self._attention is not None, "initialize_kv_cache comes first"
        return self._attention

    @property
    def _embeds(self) -> PromptEmbedsBatch:
        assert self._prompt_embeds is not None, "load_model comes first"
        return self._prompt_embeds

    @property
    def _input_batch(self) -> InputBatch:
        assert self._batch is not None, "initialize_kv_cache comes first"
        return self._batch

    def _make_layout(self, num_blocks: int) -> KVCacheLayout:
        return make_layout(
            self._model.geometry,
            num_blocks=num_blocks,
            block_size=self._cache_config.block_size,
            dtype=self._model.dtype,
            model_fingerprint=self._model.fingerprint,
        )

    @torch.inference_mode()
    def encode(self, image: EncoderInput) -> PackedArray:
        """Make an image's embeddings for another engine. Raises UnsupportedModel if the model takes none."""
        if self._images is None:
            raise UnsupportedModel(self.architecture, "it takes text only")
        return pack_embeddings(encode_image(self._model.forward.model, image))

    def _forward_step(
        self, inputs: StepInputs, logits_indices: np.ndarray, take_states: TakeStates | None = None
    ) -> Tensor:
        token_ids, positions, shape = inputs.token_ids, inputs.positions, inputs.shape
        return self._forward(token_ids, positions, shape, logits_indices, take_states, inputs.embeds)

    def _forward(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        shape: BatchShape,
        logits_indices: np.ndarray,
        take_states: TakeStates | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """[len(logits_indices), vocab_size] in the model's dtype. take_states: is given all tokens' hidden states."""
        input_ids, position_ids, indices = (
            torch.from_numpy(array).to(self._model.device) for array in (token_ids, positions, logits_indices)
        )
        backend = self._backend.prepare(shape)
        return self._model.forward(input_ids, position_ids, backend, indices, take_states, inputs_embeds)

    @torch.inference_mode()
    def _run_largest_batch(self) -> None:
        """As many tokens and sampled rows as a step can have, without a KV cache."""
        loaded, scheduler_config = self._model, self._scheduler_config
        tokens = torch.arange(scheduler_config.max_num_batched_tokens, device=loaded.device)
        num_guesses = 0 if (speculative := scheduler_config.speculative) is None else speculative.max_step_tokens
        num_rows = min(scheduler_config.max_num_seqs + num_guesses, len(tokens))
        logits = loaded.forward(
            tokens % loaded.vocab_size,
            tokens % loaded.max_model_len,
            GeometryProbe(loaded.architecture),
            tokens[: num_rows + scheduler_config.max_prompt_logprobs_per_step],
        )
        if not loaded.forward.generates:
            return
        no_tokens = np.zeros(0, dtype=np.int64)
        row = SamplingRow(SamplingParams(), no_tokens, no_tokens, loaded.eos_token_ids)
        sample(logits[:num_rows], SamplingBatch.of_rows([row] * num_rows))


def _collect(
    req_ids: list[str], token_ids: np.ndarray, sampled: np.ndarray, output: SamplerOutput
) -> ModelRunnerOutput:
    """Name the requests of what was sampled. sampled: of which request each position is."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for index, entry in zip(sampled.tolist(), output.logprobs, strict=True):
        if entry is not None:
            logprobs.setdefault(req_ids[index], []).append(entry)
    num_nans: Counter[str] = Counter()
    if any(output.num_nans):
        for index, count in zip(sampled.tolist(), output.num_nans, strict=True):
            if count:
                num_nans[req_ids[index]] += count
    return ModelRunnerOutput(req_ids, token_ids, logprobs=logprobs, num_nans_in_logits=num_nans)
