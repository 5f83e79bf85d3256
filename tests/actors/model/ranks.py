"""The ranks of one engine as threads of the test's process, joined by a real group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from actors.model.errors import RankLost
from actors.model.tensor_parallel.group import Rendezvous, TensorParallelGroup, join_group
from actors.model.tensor_parallel.rank_calls import RankTrust
from tests.trusted import RANK_TRUST

T = TypeVar("T")

_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


def on_each_rank(
    size: int,
    work: Callable[[TensorParallelGroup], T],
    trust: RankTrust = RANK_TRUST,
    device: torch.device = _CPU,
) -> list[T]:
    """Return what the ranks return, by rank. Raises what a rank failed with, before what others lost by that."""
    rendezvous = Rendezvous("127.0.0.1", device, _TIMEOUT_S)

    def run(rank: int) -> T:
        meeting = rendezvous.address if rank else rendezvous
        group = join_group(meeting, rank, size, device=device, host="127.0.0.1", timeout_s=_TIMEOUT_S, trust=trust)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        try:
            errors = [error for future in futures if (error := future.exception(2 * _TIMEOUT_S)) is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, RankLost)):
                raise error
            return [future.result() for future in futures]
        finally:
            rendezvous.close()
