"""The softmax of attention with sinks: each head has a learned score that takes weight and has no value."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys in float32.

    scores: [..., q, k]
    sinks:  broadcast to [..., q, 1], the score of each row's sink; None: the weights of a row add up to 1
    Returns the scores' shape.
    """
    if sinks is None:
        return functional.softmax(scores, dim=-1, dtype=torch.float32)
    scores = scores.float()
    extended = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    return functional.softmax(extended, dim=-1)[..., :-1]
