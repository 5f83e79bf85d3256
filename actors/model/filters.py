"""min_p, top_k and top_p: which tokens stay in the lottery.

Each becomes a lowest logit that is kept, so tokens that tie at the edge stay or go together and the order in which a
sort leaves them cannot matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Most distributions have their top_p mass in so many tokens: the rest of the vocabulary needs no sorting.
_FIRST_TOP = 1024


def filter_logits(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> None:
    """Set what is filtered out to -inf, in place: first min_p, then top_k, then top_p of what is left.

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
    """The last logit, from the top, before which less than top_p of the mass lies. The top one always stays."""
    mass = torch.softmax(logits, dim=0)
    num_top = min(_FIRST_TOP, logits.shape[0])
    while True:
        values, indices = torch.topk(logits, num_top)
        num_kept = int((mass[indices].cumsum(0, dtype=torch.float64) < top_p).sum()) + 1
        if num_kept <= num_top:
            return float(values[num_kept - 1])
        if num_top == logits.shape[0]:
            return float(values[-1])
        num_top = logits.shape[0]
