"""The running requests as arrays, so that a step in which only tokens change is a handful of vector operations.

A request has a row from its admission until it is preempted or ends; the worker's persistent batch has the same rows.
Invariants:
- A row belongs to at most one request. epochs[row] is a new number each time a request gets the row, and 0 while the
  row is vacant. A step names rows with their epochs; results for an epoch that is over are dropped.
- num_computed counts the tokens of all steps scheduled so far, including steps under way.
- decoding_since_s is when note_decoding() first found the row's prompt computed, and inf before; decoding_from is
  num_computed at that time. Since arrival_s, that is the time to the first token, for which an engine that gets the KV
  from elsewhere takes its arrival.
- num_expected counts the request's tokens, and the tokens that steps under way will add if the request may run ahead of
  them. A request has tokens to compute if and only if num_expected > num_computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from actors.core.requests.request import Request
from kv_transfer.params import TransferRole

MAX_STOP_TOKENS = 8
"""The most stop tokens that fit into the arrays; a request with more of them is checked on its own."""
_NO_TOKEN = -1
NO_ROWS: Final = np.zeros(0, dtype=np.int64)
"""An array of no rows, which nobody changes."""
NO_ROWS.setflags(write=False)


class RunningRows:
    """The RUNNING requests in the order of admission, and arrays [max_num_seqs] with what a step needs of each."""

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
        self.arrival_s = np.zeros(max_num_seqs)
        self.decoding_since_s = np.full(max_num_seqs, np.inf)
        self.decoding_from = np.zeros(max_num_seqs, dtype=np.int64)
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
        """A number that grows each time a request enters or leaves a row."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of admission."""
        return iter(self.by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    def add(self, request: Request, num_slots: int, *, runs_ahead: bool, is_plain: bool = True) -> None:
        """Give a request a row.

        num_slots: how many tokens the request's blocks can hold
        runs_ahead: the next step may be scheduled before the token of the last one is known, see Request.may_run_ahead
        is_plain:  False if each step has to handle the request on its own, see Request.is_plain
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
        self.arrival_s[row] = request.arrival_time
        self.decoding_since_s[row] = np.inf
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
        """Take a request's row back. Returns whether the request had one."""
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

    def note_decoding(self, now_s: float) -> None:
        """Note that those whose prompts are computed, and that were not noted yet, decode from now on."""
        begins = (self.decoding_since_s == np.inf) & (self.epochs > 0) & (self.num_computed >= self.num_prompt)
        self.decoding_since_s[begins] = now_s
        self.decoding_from[begins] = self.num_computed[begins]

    def decode_gaps(self, now_s: float) -> tuple[int, float]:
        """Return the number of times between tokens that those have had who decode, and the mean of these in seconds.

        Only those count that note_decoding() has seen. Both numbers are 0 if none of them has two tokens.
        """
        decodes = (self.epochs > 0) & (self.decoding_since_s < np.inf)
        num_gaps = int((self.num_computed - self.decoding_from)[decodes].sum())
        if num_gaps <= 0:
            return 0, 0.0
        return num_gaps, float((now_s - self.decoding_since_s[decodes]).sum()) / num_gaps

    def num_in_time(self, late_after_s: float) -> int:
        """Return how many of those that decode had their first token within late_after_s of their arrival.

        Those that note_decoding() has not seen yet count as in time.
        """
        decodes = (self.epochs > 0) & (self.num_computed >= self.num_prompt)
        is_new = self.decoding_since_s == np.inf
        return int((decodes & (is_new | (self.decoding_since_s - self.arrival_s <= late_after_s))).sum())

    def prompt_arrivals_s(self) -> np.ndarray:
        """Return when those arrived whose prompts are not computed yet, and that have no output, [num_prompts]."""
        return self.arrival_s[
            (self.epochs > 0) & (self.num_computed < self.num_prompt) & (self.num_expected <= self.num_prompt)
        ]

    def due(self) -> tuple[np.ndarray, list[Request]]:
        """Return the requests with tokens to compute: the rows that decode one token each, and all other requests.

        The other requests are in the order of admission, but those with draft tokens come first.
        """
        if not self.by_id:
            return NO_ROWS, []
        num_missing = self.num_expected - self.num_computed
        is_due = (num_missing > 0) & (self.num_expected < self.max_num_tokens)
        # Computing the prompt's last token is not plain decoding: an image's placeholder may stand there.
        decodes = (num_missing == 1) & (self.num_computed >= self.num_prompt)
        is_steady = is_due & self.is_plain & decodes & ~self.has_drafts
        others = (is_due ^ is_steady).nonzero()[0]
        if len(others):
            # A request that decodes with draft tokens must not wait for prompts, just as one that decodes without them.
            others = others[np.lexsort((self.epochs[others], ~self.has_drafts[others]))]
        return is_steady.nonzero()[0], self.requests[others].tolist()

    def decodes(self, request: Request) -> bool:
        """Whether a running request lacks only the KV of its last token, so that its next step gives a token."""
        row = request.row
        is_last = self.num_computed[row] == request.num_tokens - 1 and self.num_computed[row] >= self.num_prompt[row]
        return bool(is_last) and not self.is_producer[row] and request.pooling_params is None

    def num_blocks_of(self, row: int) -> int:
        """Return how many blocks the row's request holds."""
        return int(self.num_slots[row]) // self._block_size

    def num_producer_blocks(self) -> int:
        """How many blocks producers hold, requests that run for another engine; preemption cannot free these blocks."""
        return int(self.num_slots[self.is_producer].sum()) // self._block_size

    def max_consumer_tokens(self, num_more_tokens: int) -> int:
        """Return how many tokens the longest request that is no producer will have after num_more_tokens more tokens.

        No request grows beyond the most tokens that it may have.
        """
        num_tokens = np.minimum(self.max_num_tokens, self.num_expected + num_more_tokens)
        return int(num_tokens[~self.is_producer].max(initial=0))

    def num_blocks_due(self, num_steps: int) -> int:
        """Return how many blocks the decoding requests need for num_steps further steps, at most one each."""
        return int(((self.epochs > 0) & (self.num_slots - self.num_computed < num_steps)).sum())

    def num_steps_until_free(self, num_blocks: int, num_free_blocks: int, num_state_blocks: int = 0) -> int:
        """Return how many steps it takes until num_blocks are free, if each request runs to its full length.

        num_state_blocks: what each request frees beside the blocks of its tokens

        Returns 0 if nothing runs, and the steps of the longest request if even the ends of all requests free too few.
        """
        is_live = self.epochs > 0
        if not is_live.any():
            return 0
        num_left = np.where(self.is_producer, 1, self.max_num_tokens - self.num_expected)[is_live]
        order = np.argsort(num_left)
        num_left = num_left[order]
        num_released = np.cumsum(self.num_slots[is_live][order] // self._block_size + num_state_blocks)
        # While a request ends, the requests that still run have grown by as many tokens.
        num_grown = num_left * np.arange(len(num_left) - 1, -1, -1) // self._block_size
        is_enough = (num_free_blocks + num_released - num_grown >= num_blocks).nonzero()[0]
        return max(0, int(num_left[is_enough[0] if len(is_enough) else -1]))

    def num_candidates(self) -> int:
        """Return how many requests preemption may choose from: all but producers."""
        return len(self.by_id) - int(self.is_producer.sum())

    def last_admitted(self) -> Iterator[Request]:
        """Iterate over the requests, beginning with the one that was admitted last."""
        return reversed(self.by_id.values())
