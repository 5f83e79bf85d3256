"""Log-probabilities of prompts, collected over the steps that compute them.

The logits after position i are about the token at i + 1, so the last position of a prompt is not one of them, and the
first token has no log-probability. A prompt that is preempted, or starts over for another reason, is collected anew:
its entry is dropped when its request leaves its row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from torch import Tensor

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.outputs.scheduler_output import StepBatch
from actors.model.sampling.logprobs import token_logprobs
from actors.model.sampling.transfers import upload

_MAX_ROWS: Final = 64
"""The most rows of logits that are processed at once, to bound the memory that they take."""


@dataclass(slots=True)
class _Prompt:
    """A prompt of which only a part is computed yet, and the log-probabilities of that part."""

    num_top: int
    num_tokens: int
    collected: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions [first, stop) of a row's prompt. is_last: the prompt ends in this step."""

    req_id: str
    row: int
    first: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The parts of prompts whose logits a step needs. logits_indices: [n] int64, positions in the step's tokens."""

    parts: list[_Part]
    logits_indices: np.ndarray


class PromptLogprobs:
    """Collects prompts' log-probabilities by rows of the persistent batch. Steps without such prompts pay nothing."""

    def __init__(self, token_ids: np.ndarray) -> None:
        """token_ids: [max_num_seqs, max_model_len] int32, the tokens of the persistent batch's rows."""
        self._token_ids = token_ids
        self._prompts: dict[int, _Prompt] = {}

    def begin(self, row: int, num_top: int, num_tokens: int) -> None:
        """Collect the prompt of the request in this row from its start.

        num_top: how many of the likeliest tokens to name; num_tokens: of the prompt
        """
        self._prompts[row] = _Prompt(num_top, num_tokens)

    def forget(self, row: int) -> None:
        """Drop what is collected for the row, if anything: its request has left it."""
        self._prompts.pop(row, None)

    def find_parts(self, batch: StepBatch, query_starts: np.ndarray) -> PromptParts | None:
        """Return the parts of prompts in the step whose log-probabilities are wanted; None if there are none.

        query_starts: [num_requests + 1], where each request's tokens begin in the step
        """
        if not self._prompts:
            return None
        parts: list[_Part] = []
        indices: list[np.ndarray] = []
        for index in range(batch.num_plain, len(batch)):
            row = int(batch.rows[index])
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            first = int(batch.num_computed_tokens[index])
            assert first == len(prompt.collected), "a part of the prompt was not computed by this engine"
            end = first + int(batch.num_new_tokens[index])
            stop = min(end, prompt.num_tokens - 1)
            parts.append(_Part(batch.req_ids[index], row, first, stop, is_last=end >= prompt.num_tokens))
            indices.append(query_starts[index] + np.arange(stop - first))
        return PromptParts(parts, np.concatenate(indices)) if parts else None

    def take_in(self, found: PromptParts, logits: Tensor) -> dict[str, list[TokenLogprobs]]:
        """Add a step's part, and return the log-probabilities of the prompts that end in it, by request id.

        logits: [n, vocab_size] at found.logits_indices
        """
        complete: dict[str, list[TokenLogprobs]] = {}
        begin = 0
        for part in found.parts:
            prompt = self._prompts[part.row]
            end = begin + part.stop - part.first
            targets = self._token_ids[part.row, part.first + 1 : part.stop + 1].astype(np.int64)
            token_ids = upload(targets, logits.device)
            for row in range(0, end - begin, _MAX_ROWS):
                rows = logits[begin:end][row : row + _MAX_ROWS]
                prompt.collected += token_logprobs(rows, token_ids[row : row + _MAX_ROWS], prompt.num_top)
            begin = end
            if part.is_last:
                complete[part.req_id] = self._prompts.pop(part.row).collected
        return complete
