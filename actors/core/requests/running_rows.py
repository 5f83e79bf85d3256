"""The running requests as arrays, so that a step in which nothing changes but tokens is a handful of vector operations.

A request has a row from its admission until it is preempted or ends; the worker's persistent batch has the same rows.
Invariants:
- a row belongs to at most one request; epochs[row] is a new number for each, and 0 while the row is vacant: a step that
  is still under way names rows with their epochs, and what it brings for an epoch that is over is dropped
- num_computed counts the tokens of all steps scheduled so far, those under way included
- num_expected counts the request's tokens and those under way that it may go on from: tokens are due iff it is larger
  than num_computed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from actors.core.requests.request import Request
from kv_transfer.params import TransferRole

MAX_STOP_TOKENS = 8
"""A request with more of them is looked at by itself."""
_NO_TOKEN = -1


class RunningRows:
    """RUNNING requests, in the order of admission, and what a step needs of each in arrays of [max_num_seqs]."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self.by_id: dict[str, Request] = {}
        self.num_by_lora: Counter[str] = Counter()
        self.epochs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_expected = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_slots = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.max_num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.client_index = np.zeros(max_num_seqs, dtype=np.int64)
        self.attempt = np.zeros(max_num_seqs, dtype=np.int64)
        self.stop_token_ids = np.full((max_num_seqs, MAX_STOP_TOKENS), _NO_TOKEN, dtype=np.int64)
        self.is_plain = np.zeros(max_num_seqs, dtype=bool)
        self.is_producer = np.zeros(max_num_seqs, dtype=bool)
        self.runs_ahead = np.zeros(max_num_seqs, dtype=bool)
        self.may_draft = np.zeros(max_num_seqs, dtype=bool)
        self.has_drafts = np.zeros(max_num_seqs, dtype=bool)
        self.requests: np.ndarray = np.full(max_num_seqs, None, dtype=object)
        self.req_ids: np.ndarray = np.full(max_num_seqs, None, dtype=object)
        self.token_lists: np.ndarray = np.full(max_num_seqs, None, dtype=object)
        self._vacant = list(range(max_num_seqs - 1, -1, -1))
        self._last_epoch = 0
        self.num_changes = 0
        """Grows with every request that comes or goes."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of admission."""
        return iter(self.by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    def add(self, request: Request, num_slots: int, *, runs_ahead: bool, is_plain: bool = True) -> None:
        """Give a request a row.

        num_slots: of the blocks that it holds
        is_plain:  False keeps the request from being taken together with others
        """
        row = self._vacant.pop()
        self._last_epoch += 1
        self.num_changes += 1
        self.by_id[request.request_id] = request
        self.epochs[row] = self._last_epoch
        self.num_computed[row] = request.num_computed_tokens
        self.num_expected[row] = request.num_tokens
        self.num_slots[row] = num_slots
        self.num_prompt[row] = request.num_prompt_tokens
        self.max_num_tokens[row] = request.max_num_tokens
        self.client_index[row] = request.client_index
        self.attempt[row] = request.attempt
        self.is_plain[row] = is_plain and request.is_plain and len(request.stop_token_ids) <= MAX_STOP_TOKENS
        self.is_producer[row] = request.transfer_role is TransferRole.PRODUCER
        self.runs_ahead[row] = runs_ahead
        self.may_draft[row] = request.may_draft
        self.has_drafts[row] = False
        self.stop_token_ids[row] = _NO_TOKEN
        if self.is_plain[row]:
            self.stop_token_ids[row, : len(request.stop_token_ids)] = list(request.stop_token_ids)
        self.requests[row] = request
        self.req_ids[row] = request.request_id
        self.token_lists[row] = request.all_token_ids
        if request.lora_name is not None:
            self.num_by_lora[request.lora_name] += 1
        request.enter_row(self, row)

    def remove(self, request: Request) -> bool:
        """Take a request's row back; returns whether it had one."""
        if self.by_id.pop(request.request_id, None) is None:
            return False
        row = request.row
        request.leave_row()
        if request.lora_name is not None:
            self.num_by_lora[request.lora_name] -= 1
            if not self.num_by_lora[request.lora_name]:
                del self.num_by_lora[request.lora_name]
        self.num_changes += 1
        self.epochs[row] = 0
        self.is_plain[row] = self.is_producer[row] = False
        self.num_expected[row] = self.num_computed[row] = self.max_num_tokens[row] = 0
        self.num_slots[row] = 0
        self.requests[row] = self.req_ids[row] = self.token_lists[row] = None
        self._vacant.append(row)
        return True

    def due(self) -> tuple[np.ndarray, list[Request]]:
        """Return who has tokens to compute: rows that decode one token each, and the others.

        Of these, those with drafts come first, then the order is that of admission.
        """
        num_missing = self.num_expected - self.num_computed
        is_due = (num_missing > 0) & (self.num_expected < self.max_num_tokens)
        # The prompt's last token is not yet plain decoding: an encoder's output may stand there.
        decodes = (num_missing == 1) & (self.num_computed >= self.num_prompt)
        is_steady = is_due & self.is_plain & decodes & ~self.has_drafts
        others = (is_due ^ is_steady).nonzero()[0]
        if len(others):
            # Who decodes, with guesses to check, must not wait for a prompt any more than who decodes without.
            others = others[np.lexsort((self.epochs[others], ~self.has_drafts[others]))]
        return is_steady.nonzero()[0], self.requests[others].tolist()

    def decodes(self, request: Request) -> bool:
        """Whether all that a running request lacks is its last token's KV, so that the next token follows."""
        row = request.row
        is_last = self.num_computed[row] == request.num_tokens - 1 and self.num_computed[row] >= self.num_prompt[row]
        return bool(is_last) and not self.is_producer[row] and request.pooling_params is None

    def num_blocks_of(self, row: int) -> int:
        """How many blocks the row's request holds."""
        return int(self.num_slots[row]) // self._block_size

    def num_producer_blocks(self) -> int:
        """Blocks of the requests that are here for another engine: preemption can't free them."""
        return int(self.num_slots[self.is_producer].sum()) // self._block_size

    def max_consumer_tokens(self, num_more_tokens: int) -> int:
        """How many tokens the longest of the other requests has when each has so many more, or all that it may have."""
        num_tokens = np.minimum(self.max_num_tokens, self.num_expected + num_more_tokens)
        return int(num_tokens[~self.is_producer].max(initial=0))

    def num_blocks_due(self, num_steps: int) -> int:
        """How many blocks those that decode will need within so many steps, if no more than one each."""
        return int(((self.epochs > 0) & (self.num_slots - self.num_computed < num_steps)).sum())

    def num_steps_until_free(self, num_blocks: int, num_free_blocks: int) -> int:
        """How many steps until so many blocks are free, if each request takes all the tokens that it may have.

        0 if nothing runs; the longest one's if it takes more than the ends of all that run.
        """
        is_live = self.epochs > 0
        if not is_live.any():
            return 0
        num_left = np.where(self.is_producer, 1, self.max_num_tokens - self.num_expected)[is_live]
        order = np.argsort(num_left)
        num_left = num_left[order]
        num_released = np.cumsum(self.num_slots[is_live][order] // self._block_size)
        # Those that are still running have grown meanwhile.
        num_grown = num_left * np.arange(len(num_left) - 1, -1, -1) // self._block_size
        is_enough = (num_free_blocks + num_released - num_grown >= num_blocks).nonzero()[0]
        return max(0, int(num_left[is_enough[0] if len(is_enough) else -1]))

    def last_admitted(self) -> Iterator[Request]:
        """Iterate from the request that was admitted last."""
        return reversed(self.by_id.values())
