"""Tensor-parallel ranks in two processes, over torch's NCCL: sums, and a model that is split."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Site, Spawn
from tests.gpu.process import Process
from tests.gpu.rank_peer import RankPeer
from tests.gpu.test_engines import only_this_gpu
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import material

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def join(sites: list[Site], spawn: Spawn) -> list[Process]:
    ranks = [spawn(only_this_gpu(site), RankPeer, rank, len(sites), material()) for rank, site in enumerate(sites)]
    on_all(ranks, "join", ranks[0].call("address"))
    return ranks


def on_all(ranks: list[Process], method: str, *arguments: Any) -> list[Any]:
    """Call a method of all ranks at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.call(method, *arguments), ranks))


@pytest.mark.parametrize("num_numbers", [3, 1 << 20])
def test_every_rank_has_the_sum_and_everybodys_numbers(sites: list[Site], spawn: Spawn, num_numbers: int) -> None:
    last = float(num_numbers - 1)
    expected = ([1.0, 2 * last + 1], [[0.0, last], [1.0, last + 1]])
    assert on_all(join(sites, spawn), "exchange", num_numbers) == [expected, expected]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_split_model_gives_the_whole_models_tokens(
    family: str, sites: list[Site], spawn: Spawn, checkpoint: Callable[[str], Path]
) -> None:
    directory, prompts = checkpoint(family), [random_prompt(length) for length in (1, 7, 33, 40)]
    expected = [greedy_tokens(directory, tuple(prompt), 12) for prompt in prompts]
    assert on_all(join(sites, spawn), "generate", directory, prompts, 12) == [expected, expected]
