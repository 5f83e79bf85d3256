"""Changes logits before temperature: logit_bias, penalties, min_tokens' ban on stopping, and token rules."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.core.requests.token_rules import TokenRules
from actors.model.sampling.sampling_batch import SamplingRow


def change_logits(logits: Tensor, row: SamplingRow) -> None:
    """Apply one request's logit_bias, penalties, min_tokens and token rules, in this order, in place.

    logits: [vocab_size] float32
    """
    _add_bias(logits, row.params.logit_bias)
    if row.params.has_penalties:
        _penalize(logits, row)
    # A stop token that the model does not have is never sampled anyway.
    if suppressed := [token_id for token_id in row.suppressed_token_ids if 0 <= token_id < logits.shape[0]]:
        logits[torch.tensor(suppressed, device=logits.device)] = float("-inf")
    if row.rules is not None:
        _keep_rules(logits, row.rules, row.output_token_ids)


def _keep_rules(logits: Tensor, rules: TokenRules, output_token_ids: np.ndarray) -> None:
    if len(rules.allowed_token_ids):
        allowed = torch.from_numpy(rules.allowed_token_ids).to(logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    if forbidden := rules.forbidden_after(output_token_ids):
        logits[torch.tensor(forbidden, device=logits.device)] = float("-inf")


def _add_bias(logits: Tensor, logit_bias: dict[int, float]) -> None:
    if logit_bias:
        token_ids = torch.tensor(list(logit_bias), device=logits.device)
        logits[token_ids] += torch.tensor(list(logit_bias.values()), dtype=logits.dtype, device=logits.device)


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    """Apply penalties: for repetition by prompt and output, for presence and frequency by the output, as in vLLM."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _indices(np.unique(np.concatenate([row.prompt_token_ids, row.output_token_ids])), logits)
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    token_ids, counts = np.unique(row.output_token_ids, return_counts=True)
    penalties = params.frequency_penalty * counts + params.presence_penalty
    logits[_indices(token_ids, logits)] -= torch.from_numpy(penalties).to(logits)


def _indices(token_ids: np.ndarray, logits: Tensor) -> Tensor:
    return torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
