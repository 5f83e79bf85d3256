"""Samples tokens from logits.

Order of operations, as in vLLM: log-probabilities are taken from the raw logits; then logit_bias, penalties,
min_tokens, allowed_token_ids and bad_words, and what a grammar does not allow; a greedy row takes the argmax; a random
one goes on with temperature, min_p, top_k, top_p and draws.

A draw is one Philox uniform number of (seed, output position), inverted through the cumulative sum of the probabilities
in float64. Each row is computed from its own logits alone, so its token does not depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.model.grammar.mask import GrammarMask
from actors.model.sampling.filters import filter_logits
from actors.model.sampling.logprobs import token_logprobs
from actors.model.sampling.penalties import change_logits
from actors.model.sampling.philox import uniforms
from actors.model.sampling.sampling_batch import NO_LOGPROBS, SamplingBatch


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row.

    logprobs: per row, None where none were asked for
    num_nans: per row
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    num_nans: list[int]

    def at(self, rows: np.ndarray) -> SamplerOutput:
        """Return the output of some of the rows. rows: [m] int64"""
        chosen = rows.tolist()
        return SamplerOutput(
            [self.token_ids[row] for row in chosen],
            [self.logprobs[row] for row in chosen],
            [self.num_nans[row] for row in chosen],
        )


def sample(logits: Tensor, batch: SamplingBatch, grammar_mask: GrammarMask | None = None) -> SamplerOutput:
    """Sample one token per row.

    logits: [n, vocab_size], any floating dtype; not changed
    grammar_mask: of the rows that have a grammar, if any has
    """
    raw = logits.float()
    token_ids = raw.argmax(dim=-1)
    if not batch.is_plain or grammar_mask is not None:
        token_ids = _sample_rows(raw, token_ids, batch, grammar_mask)
    chosen: list[int] = token_ids.tolist()
    return SamplerOutput(chosen, _take_logprobs(raw, chosen, batch), _count_nans(raw))


def _sample_rows(raw: Tensor, greedy: Tensor, batch: SamplingBatch, grammar_mask: GrammarMask | None) -> Tensor:
    """Replace the greedy tokens of rows that are random or whose logits change."""
    is_involved = batch.is_random | batch.has_changes
    if grammar_mask is not None:
        is_involved[grammar_mask.rows] = True
    involved = np.flatnonzero(is_involved)
    logits = raw[torch.from_numpy(involved).to(raw.device)]
    for index, row in enumerate(involved.tolist()):
        if batch.has_changes[row]:
            change_logits(logits[index], batch.row_of(row))
    if grammar_mask is not None:
        grammar_mask.forbid(logits, involved)
    token_ids = logits.argmax(dim=-1)
    is_random = torch.from_numpy(batch.is_random[involved]).to(raw.device)
    if batch.is_random.any():
        token_ids[is_random] = _draw_rows(logits[is_random], batch)
    return greedy.index_copy(0, torch.from_numpy(involved).to(raw.device), token_ids)


def _draw_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply temperature and filters to the batch's random rows, in place, and draw a token for each of them."""
    rows = np.flatnonzero(batch.is_random)
    # The largest logit becomes 0, so that even the smallest temperature makes no logit infinite.
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= torch.from_numpy(batch.temperature[rows]).to(logits)[:, None].clamp_min(torch.finfo(logits.dtype).tiny)
    for index, row in enumerate(rows.tolist()):
        params = batch.row_of(row).params
        filter_logits(logits[index], top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    seeds, positions = batch.seeds_and_positions()
    return _draw(logits, torch.from_numpy(uniforms(seeds[rows], positions[rows])).to(logits.device))


def _draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """[n]: in each row the first token whose cumulative probability exceeds the row's number."""
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding may make number * total equal to total, which no token exceeds. And a token of probability 0 must not be
    # drawn.
    target = torch.minimum(total * numbers, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return drawn.clamp_max(logits.shape[-1] - 1)


def _take_logprobs(raw: Tensor, chosen: list[int], batch: SamplingBatch) -> list[TokenLogprobs | None]:
    logprobs: list[TokenLogprobs | None] = [None] * len(chosen)
    for index in np.flatnonzero(batch.num_logprobs != NO_LOGPROBS).tolist():
        token_id = torch.tensor(chosen[index : index + 1], device=raw.device)
        [logprobs[index]] = token_logprobs(raw[index : index + 1], token_id, int(batch.num_logprobs[index]))
    return logprobs


def _count_nans(raw: Tensor) -> list[int]:
    """Counted only where there are any: a maximum carries every NaN with it and costs one pass."""
    if not raw.amax(dim=-1).isnan().any():
        return [0] * raw.shape[0]
    counts: list[int] = raw.isnan().sum(dim=-1).tolist()
    return counts
