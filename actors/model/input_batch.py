"""What the worker remembers of the engine's requests from step to step.

The scheduler sends differences only: new requests whole, then each step new blocks and how far a request is.
A request is
    batched   it holds a row of the arrays: its tokens, its block table
    parked    it was preempted: its tokens are kept, its blocks are not
    forgotten it finished
A row is bound to one request until that is parked or forgotten. Rows are never moved; a step picks those that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from actors.core.sampling_params import SamplingParams
from actors.model.attention.base import BatchShape
from actors.model.sampling_batch import SamplingRow


@dataclass(slots=True)
class CachedRequest:
    """One request as the worker knows it. row is None while it is parked, and only then parked_token_ids is set."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    row: int | None = None
    parked_token_ids: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's batch in arrays.

    req_ids:        in batch order
    token_ids, positions: [num_tokens] int64
    sampled:        [num_sampled] int64, indices into req_ids of the requests whose last token is in this step
    logits_indices: [num_sampled] int64, where their last tokens are
    """

    req_ids: list[str]
    token_ids: np.ndarray
    positions: np.ndarray
    shape: BatchShape
    sampled: np.ndarray
    logits_indices: np.ndarray


class InputBatch:
    """The persistent batch: rows of tokens and block tables, updated by differences."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._requests: dict[str, CachedRequest] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)

    def __len__(self) -> int:
        """Requests known, parked ones included."""
        return len(self._requests)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Take in one step's differences. Rows are freed before new requests need them."""
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self._park(req_id)
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)

    def prepare(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """The arrays of one step, its requests in the given order."""
        req_ids = list(num_scheduled_tokens)
        rows = np.array([self._row(req_id) for req_id in req_ids], dtype=np.int64)
        query_lens = np.array(list(num_scheduled_tokens.values()), dtype=np.int64)
        query_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(query_lens)])
        num_computed = self._num_computed[rows]
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(query_starts[-1]) + np.repeat(num_computed - query_starts[:-1], query_lens)
        num_missing = self._num_tokens[rows] - (num_computed + query_lens)
        assert (num_missing >= 0).all(), "more tokens were scheduled than the requests have"
        sampled = np.flatnonzero(num_missing == 0)
        used_blocks = int(self._num_blocks[rows].max())
        return StepInputs(
            req_ids=req_ids,
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            shape=BatchShape(query_starts, num_computed, self._block_tables[rows, :used_blocks].astype(np.int64)),
            sampled=sampled,
            logits_indices=query_starts[sampled + 1] - 1,
        )

    def sampling_row(self, req_id: str) -> SamplingRow:
        """What the sampler needs of a request."""
        request, row = self._requests[req_id], self._row(req_id)
        tokens = self._token_ids[row]
        return SamplingRow(
            params=request.params,
            prompt_token_ids=tokens[: request.num_prompt_tokens],
            output_token_ids=tokens[request.num_prompt_tokens : request.num_tokens],
            eos_token_ids=request.eos_token_ids,
        )

    def append(self, req_id: str, token_id: int) -> None:
        """Add a sampled token. A request at max_model_len takes none: the scheduler ends it with this token."""
        request, row = self._requests[req_id], self._row(req_id)
        if request.num_tokens < self._token_ids.shape[1]:
            self._token_ids[row, request.num_tokens] = token_id
            self._set_num_tokens(request, row, request.num_tokens + 1)

    def _add(self, new: NewRequestData) -> None:
        self._forget(new.req_id)
        tokens = np.array(new.prompt_token_ids + new.output_token_ids, dtype=np.int32)
        request = CachedRequest(
            params=new.sampling_params,
            eos_token_ids=new.eos_token_ids,
            num_prompt_tokens=len(new.prompt_token_ids),
            num_tokens=len(tokens),
            parked_token_ids=tokens,
        )
        self._requests[new.req_id] = request
        row = self._unpark(request)
        self._set_blocks(row, new.block_ids[0])
        self._num_computed[row] = new.num_computed_tokens

    def _update_cached(self, cached: CachedRequestData) -> None:
        for index, req_id in enumerate(cached.req_ids):
            request = self._requests[req_id]
            row = self._unpark(request)
            if cached.resumed_from_preemption[index]:
                self._num_blocks[row] = 0
            self._append_blocks(row, cached.new_block_ids[index][0])
            for token_id in cached.new_token_ids[index] if cached.new_token_ids else ():
                self.append(req_id, token_id)
            known = request.num_tokens - request.num_prompt_tokens
            assert known == cached.num_output_tokens[index], (
                f"{req_id}: {known} output tokens, scheduler says otherwise"
            )
            self._num_computed[row] = cached.num_computed_tokens[index]

    def _forget(self, req_id: str) -> None:
        request = self._requests.pop(req_id, None)
        if request is not None and request.row is not None:
            self._free_rows.append(request.row)

    def _park(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None and request.row is not None:
            request.parked_token_ids = self._token_ids[request.row, : request.num_tokens].copy()
            self._free_rows.append(request.row)
            request.row = None

    def _unpark(self, request: CachedRequest) -> int:
        """The request's row; takes a free one if it has none."""
        if request.row is None:
            assert request.parked_token_ids is not None
            request.row = self._free_rows.pop()
            self._token_ids[request.row, : request.num_tokens] = request.parked_token_ids
            request.parked_token_ids = None
            self._num_blocks[request.row] = 0
            self._set_num_tokens(request, request.row, request.num_tokens)
        return request.row

    def _row(self, req_id: str) -> int:
        row = self._requests[req_id].row
        assert row is not None, f"{req_id} was preempted and not resumed"
        return row

    def _set_num_tokens(self, request: CachedRequest, row: int, num_tokens: int) -> None:
        request.num_tokens = num_tokens
        self._num_tokens[row] = num_tokens

    def _set_blocks(self, row: int, block_ids: list[int]) -> None:
        self._num_blocks[row] = 0
        self._append_blocks(row, block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = int(self._num_blocks[row])
        self._block_tables[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
