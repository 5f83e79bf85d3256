"""Log-probabilities of tokens, from raw logits."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.core.outputs.model_runner_output import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Return the log-probability and rank of one token in each row, with those of the likeliest tokens.

    logits: [n, vocab_size], any floating dtype; token_ids: [n] int64 on their device
    num_top: how many of the most likely tokens to name; no more than there are
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks: list[int] = ((logprobs > own).sum(dim=-1) + 1).tolist()
    top = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    ids = torch.cat([token_ids[:, None], top.indices], dim=-1).tolist()
    values = torch.cat([own, top.values], dim=-1).tolist()
    return [TokenLogprobs(*row) for row in zip(ids, values, ranks, strict=True)]
