"""One rank's model with its KV cache: computes the steps that the scheduler decides on, and samples.

LoadedRunner makes it (loaded_runner.py); then warm_up(), then execute_model() step by step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.config import ModelConfig
from actors.core.outputs.model_runner_output import NO_TOKEN, DraftTokenIds, ModelRunnerOutput, TokenLogprobs
from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.core.requests.abilities import Ability
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request_limits import ImageFacts
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.choice import BackendChoice
from actors.model.cache.kv_cache import copy_blocks
from actors.model.errors import UnsupportedModel
from actors.model.forward import TakeStates
from actors.model.grammar.mask import GrammarMask
from actors.model.graphs.configured_graphs import capture_graphs, make_decode_step
from actors.model.graphs.decode_graphs import DecodeGraphs
from actors.model.input_batch import InputBatch, StepInputs
from actors.model.launched_step import KnownStep, LateTokens, LaunchedStep, SamplingStep, collect
from actors.model.loader import LoadedModel
from actors.model.lora.store import AdapterStore
from actors.model.multimodal.families import image_facts
from actors.model.multimodal.image_batch import ImageBatch, encode_image, pack_embeddings
from actors.model.pooling.pooler import Pooler
from actors.model.prompt_embeds import PromptEmbedsBatch
from actors.model.sampling.prompt_logprobs import PromptParts
from actors.model.sampling.sampler import sample, start_sampling
from actors.model.spec_decode.proposer import Proposer
from actors.model.spec_decode.verification import StepDrafts
from actors.model.step_threads import StepThreads
from actors.model.uploads import upload
from kv_transfer.device_kind import is_accelerator, mark_for_waiting
from kv_transfer.layout import KVCacheLayout


class ModelRunner:
    """Owns the model, the KV cache and the persistent batch. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        layout: KVCacheLayout,
        attention: AttentionBackend,
        batch: InputBatch,
        *,
        max_num_batched_tokens: int,
        choice: BackendChoice,
        proposer: Proposer | None = None,
        adapters: AdapterStore | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        """Put the parts of a loaded model together.

        layout:   of the cache, with the model's fingerprint
        attention: the backend, with the KV cache
        batch:    the persistent batch, still empty
        choice:   how the attention backend was chosen
        proposer: drafts tokens; None if this rank drafts nothing
        adapters: None if LoRA is not configured
        threads:  of each step; None leaves torch's number as it is
        """
        self.layout = layout
        self.adapters = adapters
        self._model = model
        self._attention = attention
        self.attention_backend, self.attention_reason = choice.kind.name.value, choice.reason
        self.linear_layers, self.left_out_inputs = model.linear_layers, model.left_out_inputs
        self.threads = threads or StepThreads(0)
        """The threads of each step, from warm_up() on only where the results do not depend on them."""
        self._batch = batch
        self._max_num_batched_tokens = max_num_batched_tokens
        self._proposer = proposer
        self._pooler = Pooler(model.head)
        self._prompt_embeds = PromptEmbedsBatch(model.forward.model)
        self._graphs: DecodeGraphs | None = None
        self.cuda_graphs = ""
        """The batch sizes that capture_graphs() has captured, or the compiled step, or why there is none, in words."""
        self._newest_tokens = torch.zeros(batch.max_num_seqs, dtype=torch.int64, device=model.device)
        """The token that was last sampled for each row."""
        self._unsettled: SamplingStep | None = None
        self._images: ImageBatch | None = None
        if (family := model.vision_family) is not None:
            self._images = ImageBatch(model.forward.model, has_grid_positions=family.has_grid_positions)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode step once, so that no request pays for first-time work.

        Call it before any request. The cache stays as it was.
        """
        kv_cache = self.kv_cache
        block_size = self.layout.block_size
        num_tokens = min(self._max_num_batched_tokens, block_size, self.max_model_len - 1)
        table = np.zeros((1, 1 + num_tokens // block_size), dtype=np.int64)
        slot = np.arange(self.layout.num_state_blocks)[None]
        for start, stop in ((0, num_tokens), (num_tokens - 1, num_tokens)):
            shape = BatchShape(np.array([0, stop - start]), np.array([start]), table, state_blocks=slot)
            self._forward(np.zeros(stop - start, dtype=np.int64), np.arange(start, stop), shape, np.zeros(1, np.int64))
        # Token 0 is often the padding, whose embedding is zero.
        token, first = np.full(1, self.vocab_size // 2), np.zeros(1, np.int64)
        alone = BatchShape(np.array([0, 1]), first, table, state_blocks=slot)
        self.threads = self.threads.tried(lambda: self._forward(token, first, alone, first))
        kv_cache[: max(1, self.layout.num_state_blocks)].zero_()

    def capture_graphs(self, config: ModelConfig, max_num_seqs: int, say: Callable[[str], None]) -> None:
        """Capture decode steps, or compile those of one token on a CPU, if the settings and the model allow it.

        Call it after warm_up(), before any request. max_num_seqs: the most requests of a step; say: called with how
        far it is
        """
        with self.threads.for_step(1):
            self._graphs, self.cuda_graphs = capture_graphs(
                config,
                self._model,
                self._attention,
                self.adapters,
                say,
                max_num_seqs=max_num_seqs,
                max_model_len=self.max_model_len,
                has_drafts=self._proposer is not None,
            )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, and sample a token for each request whose last token is in the step."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> LaunchedStep:
        """Begin what execute_model() does. On an accelerator nothing is waited for, unless the step needs it.

        One thread launches steps and asks for their outputs, in the steps' order. It asks for a step's outputs before
        it launches the step after the next one.
        """
        with self.threads.for_step(scheduler_output.total_num_scheduled_tokens):
            return self._launch(scheduler_output)

    @torch.inference_mode()
    def _launch(self, scheduler_output: SchedulerOutput) -> LaunchedStep:
        has_other_tokens = scheduler_output.preempted_req_ids or scheduler_output.scheduled_resumed_reqs
        if has_other_tokens or self._proposer is not None or self._images is not None:
            self._settle()
        self._batch.update(scheduler_output)
        self._prompt_embeds.update(scheduler_output)
        self._pooler.update(scheduler_output)
        if self._images is not None:
            self._images.update(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return KnownStep(ModelRunnerOutput([], []))
        if self._unsettled is not None and self._batch.sampling_needs_tokens(scheduler_output.batch.rows):
            self._settle()
        if scheduler_output.block_copies:
            copy_blocks(self.kv_cache, scheduler_output.block_copies)
        req_ids = scheduler_output.batch.req_ids
        pooled = self._pooler.begin_step(scheduler_output.batch)
        take_states = None if pooled is None else pooled.take_states
        num_replays = self._num_replays
        inputs, logits, prompt_logprobs = self._compute(scheduler_output, take_states)
        if pooled is None and self._proposer is None and inputs.drafts is None and len(inputs.sampled):
            is_replayed = self._num_replays > num_replays
            return self._start_sampling(scheduler_output, inputs, logits, prompt_logprobs, is_replayed=is_replayed)
        if len(inputs.sampled):
            self._settle()
            output = self._sample_and_propose(scheduler_output, inputs, logits)
        else:
            output = ModelRunnerOutput(req_ids, np.full((len(req_ids), 1), NO_TOKEN, dtype=np.int64))
        output.prompt_logprobs_dict = prompt_logprobs or {}
        output.is_replayed = self._num_replays > num_replays
        if pooled is not None:
            output.pooler_output = pooled.outputs()
        return KnownStep(output, None if len(inputs.sampled) else mark_for_waiting(self._model.device))

    def _settle(self) -> None:
        """Wait for the tokens of the step that was launched last, if they have not come."""
        if self._unsettled is not None:
            self._unsettled.result()
            self._unsettled = None

    def _start_sampling(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        logits: Tensor,
        prompt_logprobs: dict[str, list[TokenLogprobs]] | None,
        *,
        is_replayed: bool = False,
    ) -> SamplingStep:
        """Sample one token for each request whose last token is in the step."""
        grammar_mask = GrammarMask.of_step(scheduler_output, inputs.sampled)
        sampling = start_sampling(logits, self._batch.sampling_batch(inputs.sampled_rows), grammar_mask)
        step = SamplingStep(self._batch, scheduler_output.batch.req_ids, inputs, sampling, prompt_logprobs)
        step.is_replayed = is_replayed
        if is_accelerator(self._model.device):
            [rows] = upload([inputs.sampled_rows], self._model.device)
            self._newest_tokens.index_copy_(0, rows, sampling.token_ids)
            self._unsettled = step
        else:
            step.result()
        return step

    def _late_tokens(self, inputs: StepInputs) -> LateTokens | None:
        """Return the tokens of a step that the host does not know yet; None if it knows all."""
        if not len(inputs.awaited):
            return None
        indices, rows = upload([inputs.awaited, inputs.awaited_rows], self._model.device)
        return LateTokens(indices, self._newest_tokens.index_select(0, rows))

    def _compute(
        self, scheduler_output: SchedulerOutput, take_states: TakeStates | None
    ) -> tuple[StepInputs, Tensor, dict[str, list[TokenLogprobs]] | None]:
        """Prepare the step's arrays and compute its logits; also returns the log-probabilities of prompts that end."""
        step = scheduler_output.batch
        with self._prompt_embeds.in_place(step) as has_embeds:
            inputs = self._batch.prepare(
                step, scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_common_prefix_blocks[0]
            )
            if self._images is not None:
                inputs = self._images.put_into(inputs, step)
            slots = None
            if self.adapters is not None:
                slots = self.adapters.take_slots(self._batch.lora_names[step.rows])
            if self._graphs is not None and not has_embeds and (size := self._graphs.size_for(inputs)) is not None:
                step_inputs = make_decode_step(inputs, self.layout.block_size, slots)
                return inputs, self._graphs.run(step_inputs, size, self._late_tokens(inputs)), None
            if self.adapters is not None:
                self.adapters.begin_step(slots, step.num_new_tokens)
            if inputs.prompts is None:
                return inputs, self._forward_step(inputs, inputs.logits_indices, take_states), None
            return inputs, *self._forward_with_prompt_logprobs(inputs, inputs.prompts, take_states)

    @torch.inference_mode()
    def encode(self, image: EncoderInput) -> PackedArray:
        """Make an image's embeddings for another engine. Raises UnsupportedModel if the model takes no images."""
        if self._images is None:
            raise UnsupportedModel(self._model.architecture, "it takes text only")
        return pack_embeddings(encode_image(self._model.forward.model, image))

    def _sample_and_propose(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, logits: Tensor
    ) -> ModelRunnerOutput:
        if inputs.drafts is None:
            output = self._start_sampling(scheduler_output, inputs, logits, None).result()
        else:
            output = self._verify_drafts(scheduler_output, inputs, inputs.drafts, logits)
        num_wanted = scheduler_output.num_drafts_wanted
        if self._proposer is not None and num_wanted is not None:
            output.draft_token_ids = _propose(self._proposer, scheduler_output.batch, inputs.sampled, num_wanted)
        return output

    def _forward_with_prompt_logprobs(
        self, inputs: StepInputs, prompts: PromptParts, take_states: TakeStates | None
    ) -> tuple[Tensor, dict[str, list[TokenLogprobs]]]:
        """Return the logits to sample from, and by request id the log-probabilities of prompts that end in the step."""
        indices = np.concatenate([inputs.logits_indices, prompts.logits_indices])
        logits = self._forward_step(inputs, indices, take_states)
        num_sampled = len(inputs.logits_indices)
        return logits[:num_sampled], self._batch.prompt_logprobs.take_in(prompts, logits[num_sampled:])

    def _verify_drafts(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, drafts: StepDrafts, logits: Tensor
    ) -> ModelRunnerOutput:
        """Sample after each draft too, and keep the drafts that are right and the token after them."""
        batch, rows, req_ids = self._batch, inputs.sampled_rows, scheduler_output.batch.req_ids
        owners = inputs.sampled[drafts.owners]
        grammar_mask = GrammarMask.of_step(scheduler_output, owners)
        sampled = sample(logits, batch.sampling_batch(rows[drafts.owners], drafts.offsets), grammar_mask)
        tokens, num_tokens = drafts.accept(np.array(sampled.token_ids, dtype=np.int64))
        batch.append_several(rows, tokens, num_tokens)
        token_ids = np.full((len(req_ids), tokens.shape[1]), NO_TOKEN, dtype=np.int64)
        token_ids[inputs.sampled] = tokens
        is_kept = drafts.offsets < num_tokens[drafts.owners]
        return collect(req_ids, token_ids, owners[is_kept], sampled.at(np.flatnonzero(is_kept)))

    def _forward_step(
        self, inputs: StepInputs, logits_indices: np.ndarray, take_states: TakeStates | None = None
    ) -> Tensor:
        token_ids, positions, shape = inputs.token_ids, inputs.positions, inputs.shape
        late = self._late_tokens(inputs)
        return self._forward(token_ids, positions, shape, logits_indices, take_states, inputs.embeds, late)

    def _forward(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        shape: BatchShape,
        logits_indices: np.ndarray,
        take_states: TakeStates | None = None,
        inputs_embeds: Tensor | None = None,
        late: LateTokens | None = None,
    ) -> Tensor:
        """Run the model over a batch.

        positions: [num_tokens] int64, or [3, num_tokens] for a model that places images by frame, row and column
        take_states: called with the hidden states of all tokens
        inputs_embeds: [num_tokens, hidden_size] in the model's dtype, instead of the embeddings of token_ids
        late: tokens that only the device knows
        Returns [len(logits_indices), vocab_size] in the model's dtype.
        """
        input_ids, position_ids, indices = upload([token_ids, positions, logits_indices], self._model.device)
        if late is not None:
            input_ids = late.put_into(input_ids)
        backend = self._attention.prepare(shape)
        return self._model.forward(input_ids, position_ids, backend, indices, take_states, inputs_embeds)

    @property
    def _num_replays(self) -> int:
        return self._model.forward.num_compiled if self._graphs is None else self._graphs.num_replays

    @property
    def kv_cache(self) -> Tensor:
        """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]."""
        return self._attention.kv_cache

    @property
    def abilities(self) -> frozenset[Ability]:
        """The kinds of requests that the model and the settings allow."""
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
        """The vectors that the model gives; None if it gives none."""
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
        return min(self._model.max_model_len, self._max_num_batched_tokens)

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
        """The number of components of one token's embedding; 0 if prompts cannot be embeddings."""
        return self._prompt_embeds.embedding_size if self.generates else 0

    @property
    def images(self) -> ImageFacts | None:
        """The limits of the model's image encoder; None if the model takes no images."""
        if self._images is None:
            return None
        return image_facts(self._model.forward.model.config, self._prompt_embeds.embedding_size)


def _propose(proposer: Proposer, batch: StepBatch, sampled: np.ndarray, num_wanted: np.ndarray) -> DraftTokenIds:
    """Draft the next tokens of requests that have a new token.

    sampled:    [num_sampled] int64, the indices of these requests in the batch
    num_wanted: [num_requests] int64, how many drafts the scheduler wants for each request of the batch
    """
    chosen = sampled[num_wanted[sampled] > 0]
    drafts = proposer.propose(batch.rows[chosen], batch.epochs[chosen], num_wanted[chosen])
    return DraftTokenIds([batch.req_ids[index] for index in chosen.tolist()], drafts)
