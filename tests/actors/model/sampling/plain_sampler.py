"""A plain sampler: one row after another, each step as its definition says. The sampler must choose the same tokens.

It shares nothing with the sampler but the random numbers. What it does was the sampler itself up to 6e34a04.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from actors.core.requests.sampling_params import SamplingParams
from actors.model.sampling.philox import uniforms
from actors.model.sampling.sampling_row import SamplingRow

_INFINITY = float("inf")


def sample_plainly(
    logits: Tensor, rows: Sequence[SamplingRow], allowed: Mapping[int, np.ndarray] | None = None
) -> list[int]:
    """Choose one token per row.

    logits: [n, vocab_size], any floating dtype
    allowed: by index of the row, which tokens its grammar allows, [vocab_size] bool
    """
    return [_sample_row(logits[i].float(), row, (allowed or {}).get(i)) for i, row in enumerate(rows)]


def _sample_row(raw: Tensor, row: SamplingRow, is_allowed: np.ndarray | None) -> int:
    params = row.params
    logits = raw.clone()
    change(logits, row)
    if is_allowed is not None:
        logits.masked_fill_(torch.from_numpy(~is_allowed), -_INFINITY)
    if params.temperature == 0.0:
        return int(logits.argmax())
    logits -= logits.max()
    logits /= torch.tensor(params.temperature, dtype=torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    apply_filters(logits, params)
    seed = np.array([params.seed & ((1 << 64) - 1)], dtype=np.uint64)
    [number] = uniforms(seed, np.array([len(row.output_token_ids)], dtype=np.uint64)).tolist()
    cumulative = torch.softmax(logits, dim=0).cumsum(0, dtype=torch.float64)
    total = float(cumulative[-1])
    target = min(total * number, math.nextafter(total, 0.0))
    drawn = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=torch.float64), right=True))
    return min(drawn, len(logits) - 1)


def change(logits: Tensor, row: SamplingRow) -> None:
    """Apply logit_bias, penalties, min_tokens, allowed_token_ids and bad_words to [vocab_size] float32, in place."""
    params, output = row.params, row.output_token_ids.tolist()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(row.prompt_token_ids, row.output_token_ids).astype(np.int64))
        scores, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        token_ids, counts = np.unique(row.output_token_ids, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(token_ids.astype(np.int64))] -= torch.from_numpy(penalties).float()
    if len(output) < params.min_tokens:
        for token_id in (*row.eos_token_ids, *params.stop_token_ids):
            if token_id < len(logits):
                logits[token_id] = -_INFINITY
    if params.allowed_token_ids:
        kept = logits[list(params.allowed_token_ids)]
        logits.fill_(-_INFINITY)
        logits[list(params.allowed_token_ids)] = kept
    for *beginning, last in params.bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            logits[last] = -_INFINITY


def apply_filters(logits: Tensor, params: SamplingParams) -> None:
    """Apply min_p, top_k and top_p to [vocab_size] float32 logits after temperature, in place."""
    if params.min_p > 0.0:
        _keep_from(logits, float(logits.max()) + math.log(params.min_p))
    if 0 < params.top_k < len(logits):
        _keep_from(logits, float(torch.topk(logits, params.top_k).values[-1]))
    if params.top_p < 1.0:
        ordered = torch.from_numpy(np.sort(logits.numpy())).flip(0)
        mass = torch.softmax(ordered, dim=0).cumsum(0, dtype=torch.float64)
        num_kept = int((mass < params.top_p).sum()) + 1
        _keep_from(logits, float(ordered[min(num_kept, len(ordered)) - 1]))


def _keep_from(logits: Tensor, lowest: float) -> None:
    logits.masked_fill_(logits < lowest, -_INFINITY)
