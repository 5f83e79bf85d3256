"""Changes logits before temperature: logit_bias, penalties, min_tokens' ban on stopping, and token rules.

A request changes few logits, so a step's changes are lists of positions in its flattened logits, over all of its rows
at once. What a request needs for them is kept from step to step; a step adds the tokens that are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from actors.model.sampling.sampling_row import SamplingRow
from actors.model.sampling.token_counts import TokenCounts
from actors.model.sampling.transfers import upload


class RowChanges:
    """The changes of one request, kept as long as the request has its row of the persistent batch."""

    def __init__(self, row: SamplingRow, vocab_size: int) -> None:
        """Prepare a request's changes. vocab_size: how many logits a row has"""
        params = row.params
        self.params = params
        self._vocab_size = vocab_size
        self.bias_token_ids = np.fromiter(params.logit_bias, dtype=np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        # A stop token that the model does not have is never sampled anyway.
        stopping = np.array([*row.eos_token_ids, *params.stop_token_ids], dtype=np.int64)
        self._stop_token_ids = stopping[(stopping >= 0) & (stopping < vocab_size)]
        self._rules = row.rules
        self._counts: TokenCounts | None = None

    @property
    def has_allowed_tokens(self) -> bool:
        """Whether all tokens but some are forbidden."""
        return bool(self.params.allowed_token_ids)

    @cached_property
    def allowed_bits(self) -> np.ndarray:
        """allowed_token_ids as a mask, [ceil(vocab_size / 32)] int32, 1 for an allowed token, the lowest bit first."""
        is_allowed = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        is_allowed[_checked(np.array(self.params.allowed_token_ids, dtype=np.int64), self._vocab_size)] = True
        return np.packbits(is_allowed, bitorder="little").view(np.int32)

    def counts(self, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that penalties change, and how often the output has each of them, both [n] int64."""
        num_known = len(row.output_token_ids) - row.num_drafts
        counts = self._counts
        if counts is None or counts.num_counted > num_known:
            is_for_prompt = self.params.repetition_penalty != 1.0
            counts = self._counts = TokenCounts(row.prompt_token_ids if is_for_prompt else row.prompt_token_ids[:0])
        if counts.num_counted < num_known:
            counts.count(row.output_token_ids[counts.num_counted : num_known])
        return counts.with_drafts(row.output_token_ids[num_known:])

    def forbidden(self, row: SamplingRow) -> np.ndarray:
        """Return the tokens that must not be sampled now, [n] int64, besides those that are not allowed at all."""
        token_ids = self._stop_token_ids[:0]
        if len(row.output_token_ids) < self.params.min_tokens:
            token_ids = self._stop_token_ids
        if self._rules is not None and (ends := self._rules.forbidden_after(row.output_token_ids)):
            token_ids = np.concatenate([token_ids, np.array(ends, dtype=np.int64)])
        return token_ids


class StepChanges:
    """The changes of several rows of logits.

    Raises IndexError where a request names a token that the model does not have: it would change another row.
    """

    def __init__(self, rows: Sequence[tuple[int, RowChanges, SamplingRow]], vocab_size: int) -> None:
        """Collect the changes. rows: the index of each row in the logits, what it changes, and its tokens"""
        biases = [(index, changes) for index, changes, _ in rows if len(changes.bias)]
        penalized = [(index, changes, row) for index, changes, row in rows if changes.params.has_penalties]
        penalties = [(index, changes.params, changes.counts(row)) for index, changes, row in penalized]
        self._biased_at = _positions([(index, each.bias_token_ids) for index, each in biases], vocab_size)
        self._bias = _join([each.bias for _, each in biases], np.float32)
        self._penalized_at = _positions([(index, token_ids) for index, _, (token_ids, _) in penalties], vocab_size)
        lengths = [len(token_ids) for _, _, (token_ids, _) in penalties]
        counts = _join([counts for _, _, (_, counts) in penalties], np.int64)
        repetition, presence, frequency = (
            np.repeat(np.array(values, dtype=np.float64), lengths)
            for values in (
                [params.repetition_penalty for _, params, _ in penalties],
                [params.presence_penalty for _, params, _ in penalties],
                [params.frequency_penalty for _, params, _ in penalties],
            )
        )
        self._repetition = repetition.astype(np.float32)
        self._deduction = np.where(counts > 0, frequency * counts + presence, 0.0).astype(np.float32)
        self._forbidden_at = _positions([(index, changes.forbidden(row)) for index, changes, row in rows], vocab_size)

    def apply(self, logits: Tensor) -> None:
        """Change the logits in place, in the order of vLLM: biases, penalties, tokens that are forbidden.

        logits: [n, vocab_size] float32, contiguous
        """
        flat, device = logits.view(-1), logits.device
        if len(self._biased_at):
            positions = upload(self._biased_at, device)
            flat[positions] += upload(self._bias, device)
        if len(self._penalized_at):
            positions, penalty = upload(self._penalized_at, device), upload(self._repetition, device)
            scores = flat[positions]
            scores = torch.where(scores > 0, scores / penalty, scores * penalty)
            flat[positions] = scores - upload(self._deduction, device)
        if len(self._forbidden_at):
            flat.index_fill_(0, upload(self._forbidden_at, device), -torch.inf)


def _positions(rows: Sequence[tuple[int, np.ndarray]], vocab_size: int) -> np.ndarray:
    """Return positions in flattened logits, [n] int64. rows: the index of each row, and tokens, int64"""
    token_ids = _checked(_join([each for _, each in rows], np.int64), vocab_size)
    starts = np.array([index * vocab_size for index, _ in rows], dtype=np.int64)
    positions: np.ndarray = token_ids + np.repeat(starts, [len(each) for _, each in rows])
    return positions


def _checked(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise IndexError(f"sampling parameters name tokens outside of the vocabulary of {vocab_size} tokens")
    return token_ids


def _join(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
