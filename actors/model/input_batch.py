"""What the worker remembers of the engine's requests from step to step.

The scheduler sends differences only: new requests whole, then each step new blocks and how far a request is.
A request is
    batched   it holds a row of the arrays: its tokens, its block table
    parked    it was preempted: its tokens are kept, its blocks are not
    forgotten it finished
A row is bound to one request until that is parked or forgotten; the scheduler says which. Rows are never moved; a step
picks those that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.outputs.scheduler_output import NewRequestData, ResumedRequestData, SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.attention.batch_attention import BatchShape
from actors.model.sampling.prompt_logprobs import PromptLogprobs, PromptParts
from actors.model.sampling.sampling_batch import SamplingBatch, SamplingRow, SamplingTable
from actors.model.spec_decode.verification import StepDrafts


@dataclass(slots=True)
class CachedRequest:
    """One request as the worker knows it. row is None while it is parked, and only then parked_token_ids is set."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    lora_name: str | None = None
    has_prompt_tokens: bool = True
    row: int | None = None
    parked_token_ids: np.ndarray | None = None
    wants_vector: bool = False
    rules: TokenRules | None = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of the persistent batch's rows.

    token_ids:  [max_num_seqs, max_model_len] int32; what follows a row's last token means nothing
    num_tokens: [max_num_seqs] int64
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's batch in arrays.

    token_ids: [num_tokens] int64
    positions: [num_tokens] int64, or [3, num_tokens] where the model places images by frame, row and column
    sampled:        [num_sampled] int64, which requests of the batch want a token, and have their last one in this step
    sampled_rows:   [num_sampled] int64, their rows
    logits_indices: [num_sampled] int64, where their last tokens are; with drafts [num_positions], theirs as well
    drafts:         None if there are none in the step
    prompts:        whose logits are wanted as well, after those at logits_indices; None if there are none in the step
    embeds:         [num_tokens, hidden_size] on the device, instead of what the tokens stand for
    """

    token_ids: np.ndarray
    positions: np.ndarray
    shape: BatchShape
    sampled: np.ndarray
    sampled_rows: np.ndarray
    logits_indices: np.ndarray
    drafts: StepDrafts | None = None
    prompts: PromptParts | None = None
    embeds: Tensor | None = None


class InputBatch:
    """The persistent batch: rows of tokens and block tables, updated by differences. The scheduler chooses the rows."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._requests: dict[str, CachedRequest] = {}
        self._by_row: list[CachedRequest | None] = [None] * max_num_seqs
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.tokens = TokenRows(self._token_ids, self._num_tokens)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.lora_names: np.ndarray = np.full(max_num_seqs, None, dtype=object)
        """[max_num_seqs], by row: the key of its request's adapter, or None."""
        self._sampling = SamplingTable(max_num_seqs)
        self.prompt_logprobs = PromptLogprobs(self._token_ids)
        self._wants_vector = np.zeros(max_num_seqs, dtype=bool)
        self._num_pooling = 0
        self._block_size = block_size

    def __len__(self) -> int:
        """Requests known, parked ones included."""
        return len(self._requests)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Take in one step's differences. Rows are freed before others need them."""
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self._park(req_id)
        for resumed in scheduler_output.scheduled_resumed_reqs:
            self._resume(resumed)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        rows, positions, block_ids = scheduler_output.batch.grown
        self._block_tables[rows, positions] = block_ids

    def prepare(
        self, batch: StepBatch, drafts: Mapping[str, Sequence[int]] | None = None, num_common_blocks: int = 0
    ) -> StepInputs:
        """The arrays of one step. drafts: guesses to check, by request id; num_common_blocks: see BatchShape."""
        rows, query_lens, num_computed = batch.rows, batch.num_new_tokens, batch.num_computed_tokens
        num_tokens = self._num_tokens[rows]
        assert (num_tokens == self._num_prompt[rows] + batch.num_output_tokens).all(), (
            "the scheduler says that a request has another number of output tokens"
        )
        query_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(query_lens)])
        seq_lens = num_computed + query_lens
        if len(rows) == query_starts[-1]:
            token_rows, positions = rows, num_computed
        else:
            token_rows = np.repeat(rows, query_lens)
            positions = np.arange(query_starts[-1]) + np.repeat(num_computed - query_starts[:-1], query_lens)
        draft_table = self._write_drafts(batch, drafts) if drafts else None
        num_missing = num_tokens - seq_lens
        if draft_table is not None:
            num_missing += (draft_table != NO_TOKEN).sum(axis=1)
        assert (num_missing >= 0).all(), "more tokens were scheduled than the requests have"
        is_sampled = num_missing == 0
        if self._num_pooling:
            is_sampled &= ~self._wants_vector[rows]
        sampled = np.flatnonzero(is_sampled)
        logits_indices = query_starts[sampled + 1] - 1
        step_drafts = None
        if draft_table is not None:
            step_drafts = StepDrafts(draft_table[sampled])
            logits_indices = step_drafts.positions_before(logits_indices)
        num_blocks = -(-int(seq_lens.max()) // self._block_size)
        return StepInputs(
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            shape=BatchShape(
                query_starts,
                num_computed,
                self._block_tables[rows, :num_blocks].astype(np.int64),
                num_common_blocks,
            ),
            sampled=sampled,
            sampled_rows=rows[sampled],
            logits_indices=logits_indices,
            drafts=step_drafts,
            prompts=self.prompt_logprobs.find_parts(batch, query_starts),
        )

    def _write_drafts(self, batch: StepBatch, drafts: Mapping[str, Sequence[int]]) -> np.ndarray:
        """Put guesses behind their rows' tokens, where they are read but do not count.

        Returns them, [num_requests, most guesses], filled up with NO_TOKEN.
        """
        table = np.full((len(batch), max(map(len, drafts.values()))), NO_TOKEN, dtype=np.int64)
        for index in range(batch.num_plain, len(batch)):
            if (token_ids := drafts.get(batch.req_ids[index])) is not None:
                row, num_tokens = batch.rows[index], self._num_tokens[batch.rows[index]]
                self._token_ids[row, num_tokens : num_tokens + len(token_ids)] = token_ids
                table[index, : len(token_ids)] = token_ids
        return table

    def sampling_batch(self, rows: np.ndarray, num_guesses: np.ndarray | None = None) -> SamplingBatch:
        """What the sampler needs of these rows. num_guesses: [n], so many of each one's guesses count as its tokens."""
        num_output_tokens = self._num_tokens[rows] - self._num_prompt[rows]
        if num_guesses is not None:
            num_output_tokens = num_output_tokens + num_guesses
        return SamplingBatch(
            self._sampling,
            rows,
            num_output_tokens,
            lambda index: self.sampling_row(int(rows[index]), int(num_output_tokens[index])),
        )

    def sampling_row(self, row: int, num_output_tokens: int) -> SamplingRow:
        """What the sampler needs of a row that it has to look at, with so many output tokens."""
        request = self._by_row[row]
        assert request is not None, "a row is sampled that no request has"
        tokens, num_prompt = self._token_ids[row], request.num_prompt_tokens
        return SamplingRow(
            params=request.params,
            prompt_token_ids=tokens[: num_prompt if request.has_prompt_tokens else 0],
            output_token_ids=tokens[num_prompt : num_prompt + num_output_tokens],
            eos_token_ids=request.eos_token_ids,
            rules=request.rules,
        )

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Add a sampled token to each row. One at max_model_len takes none: the scheduler ends it with this token."""
        has_room = self._num_tokens[rows] < self._token_ids.shape[1]
        rows = rows[has_room]
        self._token_ids[rows, self._num_tokens[rows]] = token_ids[has_room]
        self._num_tokens[rows] += 1

    def append_several(self, rows: np.ndarray, token_ids: np.ndarray, num_sampled: np.ndarray) -> None:
        """Add so many tokens to each row: guesses that were right, which are there already, and the one after them.

        token_ids: [n, most tokens]; num_sampled: [n], at least 1
        """
        self._num_tokens[rows] += num_sampled - 1
        self.append(rows, token_ids[np.arange(len(rows)), num_sampled - 1])

    def _add(self, new: NewRequestData) -> None:
        self._forget(new.req_id)
        request = CachedRequest(
            new.sampling_params,
            new.eos_token_ids,
            len(new.prompt_token_ids),
            new.lora_name,
            has_prompt_tokens=new.prompt_embeds is None,
            wants_vector=new.pooling_params is not None,
            rules=TokenRules.of(new.sampling_params),
        )
        self._requests[new.req_id] = request
        self._num_pooling += request.wants_vector
        tokens = np.array(new.prompt_token_ids + new.output_token_ids, dtype=np.int32)
        self._enter(request, new.row, tokens, new.block_ids[0])

    def _resume(self, resumed: ResumedRequestData) -> None:
        request = self._requests[resumed.req_id]
        tokens = request.parked_token_ids
        assert tokens is not None, f"{resumed.req_id} is resumed, but was not preempted"
        assert len(tokens) >= resumed.num_tokens, f"{resumed.req_id} has more tokens than the worker knows"
        request.parked_token_ids = None
        self._enter(request, resumed.row, tokens[: resumed.num_tokens], resumed.block_ids[0])

    def _enter(self, request: CachedRequest, row: int, tokens: np.ndarray, block_ids: list[int]) -> None:
        assert self._by_row[row] is None, f"row {row} is given away twice"
        self._by_row[row] = request
        request.row = row
        self._token_ids[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)
        self._num_prompt[row] = request.num_prompt_tokens
        self.lora_names[row] = request.lora_name
        self._block_tables[row, : len(block_ids)] = block_ids
        self._wants_vector[row] = request.wants_vector
        self._sampling.set(row, request.params)
        if request.params.prompt_logprobs is not None and len(tokens) == request.num_prompt_tokens:
            self.prompt_logprobs.begin(row, request.params.prompt_logprobs, request.num_prompt_tokens)

    def _forget(self, req_id: str) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self._num_pooling -= request.wants_vector
        if request.row is not None:
            self._by_row[request.row] = None
            self.prompt_logprobs.forget(request.row)

    def _park(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None and request.row is not None:
            request.parked_token_ids = self._token_ids[request.row, : self._num_tokens[request.row]].copy()
            self._by_row[request.row] = None
            self.prompt_logprobs.forget(request.row)
            request.row = None
