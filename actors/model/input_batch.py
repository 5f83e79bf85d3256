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
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from torch import Tensor

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.outputs.scheduler_output import (
    GroupBlockIds,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
    StepBatch,
)
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.attention.batch_attention import BatchShape
from actors.model.sampling.prompt_logprobs import PromptLogprobs, PromptParts
from actors.model.sampling.sampling_batch import SamplingBatch, SamplingTable
from actors.model.sampling.sampling_row import SamplingRow
from actors.model.spec_decode.verification import StepDrafts

_NONE: Final = -1


def _no_indices() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


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
class AwaitedTokens:
    """Tokens that were added to rows, one each, before they are known.

    sampled:   [n] int64, the indices among the sampled rows of those that have room for a token
    rows:      [n] int64
    positions: [n] int64, the index of the new token in each row
    tenures:   [n] int64, see InputBatch
    """

    sampled: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    tenures: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's batch in arrays.

    token_ids: [num_tokens] int64
    positions: [num_tokens] int64, or [3, num_tokens] where the model places images by frame, row and column
    sampled:        [num_sampled] int64, the indices of the requests that get a token: their last token is in the step
    sampled_rows:   [num_sampled] int64, the rows of these requests
    logits_indices: [num_sampled] int64, the positions of their last tokens; [num_positions] with drafts, which have
                    positions of their own
    drafts:         the draft tokens that the step verifies; None if it has none
    prompts:        the positions whose log-probabilities are wanted too; None if the step has none
    embeds:         [num_tokens, hidden_size] on the device, instead of the embeddings of token_ids; None without images
    awaited:        [n] int64, the indices of tokens that the step before samples and that have not come yet
    awaited_rows:   [n] int64, their rows
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
    awaited: np.ndarray = field(default_factory=_no_indices)
    awaited_rows: np.ndarray = field(default_factory=_no_indices)


class InputBatch:
    """The persistent batch: rows of tokens and block tables, updated by differences. The scheduler chooses the rows."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_state_blocks: int = 0) -> None:
        """num_state_blocks: of a request's recurrent state"""
        self._requests: dict[str, CachedRequest] = {}
        self._by_row: list[CachedRequest | None] = [None] * max_num_seqs
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._state_blocks = np.zeros((max_num_seqs, num_state_blocks), dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.tokens = TokenRows(self._token_ids, self._num_tokens)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._tenures = np.zeros(max_num_seqs, dtype=np.int64)
        """How often a request has left each row: a token that comes late may be for a request that is gone."""
        self._awaited = np.full(max_num_seqs, _NONE, dtype=np.int64)
        """The position of each row's token that has not come yet."""
        self.lora_names: np.ndarray = np.full(max_num_seqs, None, dtype=object)
        """[max_num_seqs] object: the key of the adapter of each row's request, or None."""
        self._sampling = SamplingTable(max_num_seqs)
        self.prompt_logprobs = PromptLogprobs(self._token_ids)
        self._wants_vector = np.zeros(max_num_seqs, dtype=bool)
        self._num_pooling = 0
        self._block_size = block_size

    @property
    def max_num_seqs(self) -> int:
        """How many rows there are."""
        return len(self._by_row)

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

        drafts: the draft tokens to verify, by request id
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
        awaited = np.flatnonzero(self._awaited[token_rows] == positions)
        return StepInputs(
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            shape=BatchShape(
                query_starts,
                num_computed,
                self._block_tables[rows, :num_blocks].astype(np.int64),
                num_common_blocks,
                self._state_blocks[rows],
            ),
            sampled=sampled,
            sampled_rows=rows[sampled],
            logits_indices=logits_indices,
            drafts=step_drafts,
            prompts=self.prompt_logprobs.find_parts(batch, query_starts),
            awaited=awaited,
            awaited_rows=token_rows[awaited],
        )

    def _write_drafts(self, batch: StepBatch, drafts: Mapping[str, Sequence[int]]) -> np.ndarray:
        """Write drafts behind their rows' tokens, where the step reads them; num_tokens does not count them.

        Returns the drafts, [num_requests, most drafts] int64, filled up with NO_TOKEN.
        """
        table = np.full((len(batch), max(map(len, drafts.values()))), NO_TOKEN, dtype=np.int64)
        for index in range(batch.num_plain, len(batch)):
            if (token_ids := drafts.get(batch.req_ids[index])) is not None:
                row, num_tokens = batch.rows[index], self._num_tokens[batch.rows[index]]
                self._token_ids[row, num_tokens : num_tokens + len(token_ids)] = token_ids
                table[index, : len(token_ids)] = token_ids
        return table

    def sampling_batch(self, rows: np.ndarray, num_drafts: np.ndarray | None = None) -> SamplingBatch:
        """Return the sampler's input for these rows.

        rows: [n] int64; num_drafts: [n] int64, how many drafts count as output tokens of each row
        """
        num_output_tokens = self._num_tokens[rows] - self._num_prompt[rows]
        if num_drafts is not None:
            num_output_tokens = num_output_tokens + num_drafts
        return SamplingBatch(
            self._sampling,
            rows,
            num_output_tokens,
            lambda index: self._sampling_row(
                int(rows[index]), int(num_output_tokens[index]), 0 if num_drafts is None else int(num_drafts[index])
            ),
        )

    def _sampling_row(self, row: int, num_output_tokens: int, num_drafts: int) -> SamplingRow:
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
            num_drafts=num_drafts,
        )

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Add a sampled token to each row. rows, token_ids: [n] int64"""
        self.fill(self.extend(rows), token_ids)

    def extend(self, rows: np.ndarray) -> AwaitedTokens:
        """Add a token to each row that is not known yet. rows: [n] int64

        A row at max_model_len has no room for it: the scheduler ends its request with this token.
        """
        sampled = np.flatnonzero(self._num_tokens[rows] < self._token_ids.shape[1])
        rows = rows[sampled]
        positions = self._num_tokens[rows]
        self._num_tokens[rows] += 1
        self._awaited[rows] = positions
        return AwaitedTokens(sampled, rows, positions, self._tenures[rows])

    def fill(self, awaited: AwaitedTokens, token_ids: np.ndarray) -> None:
        """Write tokens that have come. Those of requests that have left their row meanwhile are dropped.

        token_ids: [num_sampled] int64, of all rows that were sampled together
        """
        stays = self._tenures[awaited.rows] == awaited.tenures
        rows, positions = awaited.rows[stays], awaited.positions[stays]
        self._token_ids[rows, positions] = token_ids[awaited.sampled[stays]]
        self._awaited[rows[self._awaited[rows] == positions]] = _NONE

    def sampling_needs_tokens(self, rows: np.ndarray) -> bool:
        """Whether the sampler reads the tokens of any of these rows, for penalties or token rules."""
        return bool(self._sampling.changes_logits[rows].any())

    def append_several(self, rows: np.ndarray, token_ids: np.ndarray, num_sampled: np.ndarray) -> None:
        """Add several tokens to each row: the right drafts, which the row holds already, and the token after them.

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
        self._enter(request, new.row, tokens, new.block_ids)

    def _resume(self, resumed: ResumedRequestData) -> None:
        request = self._requests[resumed.req_id]
        tokens = request.kept_token_ids
        assert tokens is not None, f"{resumed.req_id} is resumed, but was not preempted"
        assert len(tokens) >= resumed.num_tokens, f"{resumed.req_id} has more tokens than the worker knows"
        request.kept_token_ids = None
        self._enter(request, resumed.row, tokens[: resumed.num_tokens], resumed.block_ids)

    def _enter(self, request: CachedRequest, row: int, tokens: np.ndarray, block_ids: GroupBlockIds) -> None:
        assert self._by_row[row] is None, f"row {row} still belongs to another request"
        self._by_row[row] = request
        request.row = row
        self._token_ids[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)
        self._num_prompt[row] = request.num_prompt_tokens
        self.lora_names[row] = request.lora_name
        self._block_tables[row, : len(block_ids[0])] = block_ids[0]
        if self._state_blocks.shape[1]:
            self._state_blocks[row] = block_ids[1]
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
            self._leave(request.row)

    def _preempt(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None and request.row is not None:
            request.kept_token_ids = self._token_ids[request.row, : self._num_tokens[request.row]].copy()
            self._leave(request.row)
            request.row = None

    def _leave(self, row: int) -> None:
        self._by_row[row] = None
        self._tenures[row] += 1
        self._awaited[row] = _NONE
        self.prompt_logprobs.forget(row)
        self._sampling.clear(row)
