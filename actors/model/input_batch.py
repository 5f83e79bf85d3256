"""The requests that a worker knows, kept in arrays from step to step.

The scheduler sends differences only: new requests whole, then in each step the new blocks and each request's progress.
A request is
    batched   it has a row of the arrays: its tokens and its block table
    preempted it has no row: its tokens are kept, its blocks are not
    forgotten it has finished
A row belongs to one request until that request is preempted or forgotten; the scheduler chooses the row. Requests are
never moved between rows; a step selects the rows that it computes.
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
    """One request as the worker knows it. Invariant: either row or kept_token_ids is set.

    row:            None while the request is preempted
    kept_token_ids: [num_tokens] int32, the tokens of a preempted request
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    lora_name: str | None = None
    has_prompt_tokens: bool = True
    row: int | None = None
    kept_token_ids: np.ndarray | None = None
    wants_vector: bool = False
    rules: TokenRules | None = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of the persistent batch's rows.

    token_ids:  [max_num_seqs, max_model_len] int32; what follows a row's last token means nothing
    num_tokens: [max_num_seqs] int64, how many tokens each row has
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's batch in arrays.

    token_ids: [num_tokens] int64
    positions: [num_tokens] int64, or [3, num_tokens] where the model places images by frame, row and column
    sampled:        [num_sampled] int64, the indices of the requests that get a token: their last token is in the step
    sampled_rows:   [num_sampled] int64, the rows of these requests
    logits_indices: [num_sampled] int64, the positions of their last tokens; [num_positions] with drafts, which have
                    positions of their own
    drafts:         the guesses that the step verifies; None if it has none
    prompts:        the positions whose log-probabilities are wanted too; None if the step has none
    embeds:         [num_tokens, hidden_size] on the device, instead of the embeddings of token_ids; None without images
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
        """[max_num_seqs] object: the key of the adapter of each row's request, or None."""
        self._sampling = SamplingTable(max_num_seqs)
        self.prompt_logprobs = PromptLogprobs(self._token_ids)
        self._wants_vector = np.zeros(max_num_seqs, dtype=bool)
        self._num_pooling = 0
        self._block_size = block_size

    def __len__(self) -> int:
        """Return how many requests the worker knows, preempted requests included."""
        return len(self._requests)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Apply one step's differences. Rows are freed before other requests take them."""
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self._preempt(req_id)
        for resumed in scheduler_output.scheduled_resumed_reqs:
            self._resume(resumed)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        rows, positions, block_ids = scheduler_output.batch.grown
        self._block_tables[rows, positions] = block_ids

    def prepare(
        self, batch: StepBatch, drafts: Mapping[str, Sequence[int]] | None = None, num_common_blocks: int = 0
    ) -> StepInputs:
        """Return the arrays of one step.

        drafts: the guesses to verify, by request id
        num_common_blocks: see BatchShape
        """
        rows, query_lens, num_computed = batch.rows, batch.num_new_tokens, batch.num_computed_tokens
        num_tokens = self._num_tokens[rows]
        assert (num_tokens == self._num_prompt[rows] + batch.num_output_tokens).all(), (
            "the scheduler and the worker count different numbers of output tokens"
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
        """Write guesses behind their rows' tokens, where the step reads them; num_tokens does not count them.

        Returns the guesses, [num_requests, most guesses] int64, filled up with NO_TOKEN.
        """
        table = np.full((len(batch), max(map(len, drafts.values()))), NO_TOKEN, dtype=np.int64)
        for index in range(batch.num_plain, len(batch)):
            if (token_ids := drafts.get(batch.req_ids[index])) is not None:
                row, num_tokens = batch.rows[index], self._num_tokens[batch.rows[index]]
                self._token_ids[row, num_tokens : num_tokens + len(token_ids)] = token_ids
                table[index, : len(token_ids)] = token_ids
        return table

    def sampling_batch(self, rows: np.ndarray, num_guesses: np.ndarray | None = None) -> SamplingBatch:
        """Return the sampler's input for these rows.

        rows: [n] int64; num_guesses: [n] int64, how many guesses count as output tokens of each row
        """
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
        """Return the sampler's input for a row that needs more than a column of the sampling table."""
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
        """Add a sampled token to each row.

        A row at max_model_len has no room for it: the scheduler ends its request with this token.
        rows, token_ids: [n] int64
        """
        has_room = self._num_tokens[rows] < self._token_ids.shape[1]
        rows = rows[has_room]
        self._token_ids[rows, self._num_tokens[rows]] = token_ids[has_room]
        self._num_tokens[rows] += 1

    def append_several(self, rows: np.ndarray, token_ids: np.ndarray, num_sampled: np.ndarray) -> None:
        """Add several tokens to each row: the right guesses, which the row holds already, and the token after them.

        token_ids: [n, most tokens] int64; num_sampled: [n] int64, how many of token_ids each row gets; at least 1
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
        tokens = request.kept_token_ids
        assert tokens is not None, f"{resumed.req_id} is resumed, but was not preempted"
        assert len(tokens) >= resumed.num_tokens, f"{resumed.req_id} has more tokens than the worker knows"
        request.kept_token_ids = None
        self._enter(request, resumed.row, tokens[: resumed.num_tokens], resumed.block_ids[0])

    def _enter(self, request: CachedRequest, row: int, tokens: np.ndarray, block_ids: list[int]) -> None:
        assert self._by_row[row] is None, f"row {row} still belongs to another request"
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

    def _preempt(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None and request.row is not None:
            request.kept_token_ids = self._token_ids[request.row, : self._num_tokens[request.row]].copy()
            self._by_row[request.row] = None
            self.prompt_logprobs.forget(request.row)
            request.row = None
