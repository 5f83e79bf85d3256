"""Filters logits by min_p, top_k and top_p, so that only the remaining tokens can be sampled.

Each filter becomes a lowest logit to keep. So tokens with the same logit stay or go together, and the order in which a
sort leaves them cannot matter. top_k works on what min_p leaves, and top_p on what these two leave.

A row with a small top_k needs its largest logits only, which a partial selection finds. A row with top_p needs all of
its logits in order, because its probabilities are divided by their sum in float32, and the sum depends on the order in
which it is taken; what a top_k removes adds nothing to it. On the CPU numpy sorts and selects with vector instructions,
which takes a hundredth of the time of torch's sort and is no slower than a selection that has to be checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.model.sampling.transfers import is_on_host, upload

_SMALL_SHARE: Final = 8
"""A number is small beside the vocabulary's size up to the size divided by this."""
_LEAST_WIDTH: Final = 64
"""The fewest logits that are selected. Widths are powers of two, whole vectors of the processor's."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of n rows.

    top_k:     [n] int64, 0 or at least vocab_size where all tokens may stay
    top_p:     [n] float64, 1 where all tokens may stay
    log_min_p: [n] float32, the logarithm of min_p: -inf where all tokens may stay
    """

    top_k: np.ndarray
    top_p: np.ndarray
    log_min_p: np.ndarray

    def at(self, rows: np.ndarray) -> Filters:
        """Return the filters of some of the rows. rows: [m] int64"""
        return Filters(self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:
    """Set filtered logits to -inf; the logits that are returned may be the given ones.

    logits: [n, vocab_size] float32, after temperature, the largest of each row being 0; not changed
    Temporary memory: at most 16 bytes for each logit on the CPU, 28 on other devices.
    """
    vocab_size = logits.shape[1]
    has_top_k = (filters.top_k > 0) & (filters.top_k < vocab_size)
    has_top_p = filters.top_p < 1.0
    if not (has_top_k | has_top_p | (filters.log_min_p > -np.inf)).any():
        return logits
    is_narrow = has_top_k & (filters.top_k <= vocab_size // _SMALL_SHARE)
    if not is_on_host(logits):
        # Only the host can find out whether a selection has all the logits that top_p needs.
        is_narrow &= ~has_top_p
    is_wide = (has_top_k | has_top_p) & ~is_narrow
    lowest = upload(filters.log_min_p.copy(), logits.device)
    if is_narrow.any():
        is_wide[_narrow(logits, lowest, filters, np.flatnonzero(is_narrow))] = True
    if is_wide.any():
        rows = np.flatnonzero(is_wide)
        chosen = upload(rows, logits.device)
        ordered, many = _sort_descending(logits.index_select(0, chosen)), filters.at(rows)
        lowest[chosen] = _raise_by_top_p(ordered, _raise_by_top_k(ordered, lowest[chosen], many), many)
    return _keep_from(logits, lowest)


def _narrow(logits: Tensor, lowest: Tensor, filters: Filters, rows: np.ndarray) -> np.ndarray:
    """Find the lowest logits of rows with a small top_k among their largest ones.

    lowest: [n] float32, what min_p keeps; changed in place
    Returns the rows whose top_p needs more logits than were selected, [m] int64; theirs are as before.
    """
    few = filters.at(rows)
    width = min(max(_LEAST_WIDTH, 1 << (2 * int(few.top_k.max()) - 1).bit_length()), logits.shape[1])
    chosen = upload(rows, logits.device)
    ordered = _select_largest(logits[chosen], width)
    found = _raise_by_top_k(ordered, lowest[chosen], few)
    lowest[chosen] = _raise_by_top_p(ordered, found, few)
    if width == logits.shape[1] or not is_on_host(logits):
        return rows[:0]
    # Logits that equal the lowest one stay too, and may be among those that were not selected.
    is_cut = (ordered[:, -1] >= found).numpy() & (few.top_p < 1.0)
    undecided = rows[is_cut]
    lowest[undecided] = torch.from_numpy(filters.log_min_p[undecided])
    return undecided


def _raise_by_top_k(ordered: Tensor, lowest: Tensor, filters: Filters) -> Tensor:
    """ordered: [n, m], the largest logits, the largest first; m is at least top_k where it filters."""
    has_top_k = (filters.top_k > 0) & (filters.top_k <= ordered.shape[1])
    if not has_top_k.any():
        return lowest
    last = upload(np.where(has_top_k, filters.top_k - 1, ordered.shape[1] - 1), ordered.device)
    return torch.maximum(lowest, ordered.gather(1, last[:, None])[:, 0])


def _raise_by_top_p(ordered: Tensor, lowest: Tensor, filters: Filters) -> Tensor:
    """Raise to the smallest logit whose larger ones hold less than top_p of the probability. The largest always stays.

    ordered: [n, m], the largest logits, the largest first; none that is left out is as large as the lowest
    """
    if not (filters.top_p < 1.0).any():
        return lowest
    is_first_filter = not ((filters.top_k > 0) | (filters.log_min_p > -np.inf)).any()
    kept = ordered if is_first_filter else _keep_from(ordered, lowest)
    probabilities = torch.softmax(kept, dim=-1)
    top_p = upload(np.where(filters.top_p < 1.0, filters.top_p, np.inf), ordered.device)[:, None]
    num_larger = _count_below(probabilities, top_p).clamp_max_(ordered.shape[1] - 1)
    return torch.maximum(lowest, kept.gather(1, num_larger)[:, 0])


def _count_below(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1] int64: how many of each row's cumulative sums are less than top_p. top_p: [n, 1] float64"""
    first = probabilities.shape[1] // _SMALL_SHARE
    if is_on_host(probabilities) and first:
        # The sums of the likeliest tokens are enough for most.
        sums = probabilities[:, :first].cumsum(dim=-1, dtype=torch.float64)
        if bool((sums[:, -1:] >= top_p).all()):
            return torch.searchsorted(sums, top_p)
    return torch.searchsorted(probabilities.cumsum(dim=-1, dtype=torch.float64), top_p)


def _keep_from(logits: Tensor, lowest: Tensor) -> Tensor:
    """Return a copy in which the logits below the row's lowest one are -inf. lowest: [n]

    A fill by a mask takes twenty times as long on the CPU where the mask cannot be predicted.
    """
    bounds = logits - lowest[:, None]
    torch.copysign(torch.full((), torch.inf, device=logits.device), bounds, out=bounds)
    return torch.minimum(logits, bounds, out=bounds)


def _select_largest(logits: Tensor, width: int) -> Tensor:
    """Return each row's largest logits, [n, width], the largest first. The logits may be changed."""
    if not is_on_host(logits):
        return torch.topk(logits, width).values
    if width < logits.shape[1]:
        logits.neg_().numpy().partition(width, axis=1)
        logits = logits[:, :width].neg()
    return _sort_descending(logits)


def _sort_descending(logits: Tensor) -> Tensor:
    """Sort without indices. The logits may be changed."""
    if not is_on_host(logits):
        return torch.sort(logits, descending=True).values
    logits.neg_().numpy().sort(axis=1)
    return logits.neg_()
