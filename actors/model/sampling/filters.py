"""Filters logits by min_p, top_k and top_p, so that only the remaining tokens can be sampled.

Each filter becomes a lowest logit to keep. So tokens with the same logit stay or go together, and the order in which a
sort leaves them cannot matter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def filter_logits(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> None:
    """Set filtered logits to -inf, in place: first by min_p, then by top_k, then by top_p of the logits that are left.

    logits: [vocab_size] float32, after temperature
    """
    if min_p > 0.0:
        _keep_from(logits, float(logits.max()) + math.log(min_p))
    if 0 < top_k < logits.shape[0]:
        _keep_from(logits, float(torch.topk(logits, top_k).values[-1]))
    if top_p < 1.0:
        _keep_from(logits, _lowest_in_top_p(logits, top_p))


def _keep_from(logits: Tensor, lowest: float) -> None:
    logits.masked_fill_(logits < lowest, float("-inf"))


def _lowest_in_top_p(logits: Tensor, top_p: float) -> float:
    """Return the smallest logit whose larger ones hold less than top_p of the probability. The largest always stays."""
    ordered = _sort_descending(logits)
    mass = torch.softmax(ordered, dim=0).cumsum(0, dtype=torch.float64)
    num_kept = int((mass < top_p).sum()) + 1
    return float(ordered[min(num_kept, ordered.shape[0]) - 1])


def _sort_descending(logits: Tensor) -> Tensor:
    """Sort without indices. On the CPU numpy's sort takes a tenth of the time of torch's, which also tracks indices."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy())).flip(0)
    return torch.sort(logits, descending=True).values
