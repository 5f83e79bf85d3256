"""Log-probabilities of tokens, from raw logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.model.sampling.transfers import Fetch


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Return the log-probability and rank of one token in each row, with those of the likeliest tokens.

    logits: [n, vocab_size], any floating dtype; token_ids: [n] int64 on their device
    num_top: how many of the most likely tokens to name; no more than there are
    """
    return read_logprobs(Fetch(compute_logprobs(logits, token_ids, num_top)).wait())


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Tensor]:
    """Compute what token_logprobs() returns, without waiting for the device.

    Returns the tokens [n, 1 + num_top] int64, their log-probabilities [n, 1 + num_top] float32, and ranks [n] int64.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    return [torch.cat([token_ids[:, None], top.indices], dim=-1), torch.cat([own, top.values], dim=-1), ranks]


def read_logprobs(fetched: list[np.ndarray]) -> list[TokenLogprobs]:
    """Make the output of each row. fetched: what compute_logprobs() returns, on the host"""
    token_ids, logprobs, ranks = fetched
    rows = zip(token_ids.astype(np.int64).tolist(), logprobs.tolist(), ranks.astype(np.int64).tolist(), strict=True)
    return [TokenLogprobs(*row) for row in rows]
