"""Plans the products of a step's tokens with their adapters, once for all layers.

Adapters have slots. Where tokens of one adapter stand together, as in a prompt, their products are computed by
themselves. The others, above all the decoding requests, share one product with the matrices of all their adapters side
by side; between the two matrices, the part of a token's result that belongs to other adapters is set to zero. So a step
costs two products for each layer and each prompt, and two for all that decode, however many adapters these have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.model.uploads import upload

NO_SLOT: Final = -1
MIN_RUN_TOKENS: Final = 16
"""Shorter runs of one adapter's tokens go into the shared product (measured by benchmarks/lora.py)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [begin, end) have the adapter in this slot."""

    begin: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Tokens [begin, end) go through slots [first_slot, last_slot] together.

    is_foreign: [end - begin, slots * max_rank] bool, on the device: True for the rows of adapters that a token does not
        have
    is_recorded: a graph records the products, so that they must not be left out because the slots are empty now
    """

    begin: int
    end: int
    first_slot: int
    last_slot: int
    is_foreign: Tensor
    is_recorded: bool = False


@dataclass(frozen=True, slots=True)
class LoraStep:
    """A step's plan. Each token with an adapter is either in one of the runs or in the shared part."""

    runs: tuple[Run, ...]
    shared: SharedPart | None


def plan_step(token_slots: np.ndarray, max_rank: int, device: torch.device) -> LoraStep | None:
    """Plan a step; returns None if no token has an adapter.

    token_slots: [num_tokens] int64, NO_SLOT for a token without an adapter
    """
    runs = _find_runs(token_slots)
    if not runs:
        return None
    short = [run for run in runs if run.end - run.begin < MIN_RUN_TOKENS]
    if len(short) == 1:
        short = []
    taken = set(short)
    return LoraStep(
        tuple(run for run in runs if run not in taken),
        _share(token_slots, short, max_rank, device) if short else None,
    )


def _find_runs(token_slots: np.ndarray) -> list[Run]:
    edges = np.flatnonzero(np.diff(token_slots)) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), len(token_slots)]
    slots = token_slots[begins].tolist()
    return [Run(begin, end, slot) for begin, end, slot in zip(begins, ends, slots, strict=True) if slot != NO_SLOT]


def _share(token_slots: np.ndarray, runs: list[Run], max_rank: int, device: torch.device) -> SharedPart:
    begin, end = runs[0].begin, runs[-1].end
    own = np.full(end - begin, NO_SLOT, dtype=np.int64)
    for run in runs:
        own[run.begin - begin : run.end - begin] = run.slot
    first_slot, last_slot = min(run.slot for run in runs), max(run.slot for run in runs)
    columns = np.repeat(np.arange(first_slot, last_slot + 1), max_rank)
    [is_foreign] = upload([own[:, None] != columns[None, :]], device)
    return SharedPart(begin, end, first_slot, last_slot, is_foreign)
