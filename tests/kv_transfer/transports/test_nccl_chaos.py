"""Links that are aborted, or fail, at any launch: what was received is right, and what was lost stays lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kv_transfer.errors import LinkLost
from kv_transfer.transports.nccl import NcclLink
from tests.kv_transfer.transports.fake_nccl import FakeNcclError, FakeNetwork
from tests.kv_transfer.transports.nccl_ends import TIMEOUT_S, End, linked, make_end, random_blocks, start

NUM_CHUNKS = 6
NUM_BLOCKS = 7
STALL_S = 0.2


@dataclass(slots=True)
class Fault:
    """Strikes when one end launches for the n-th time."""

    strike: Callable[[], None]
    at_launch: int

    def on_launch(self) -> None:
        self.at_launch -= 1
        if self.at_launch == 0:
            self.strike()


def choose_strike(choice: random.Random, end: End, link: NcclLink) -> Callable[[], None]:
    return choice.choice(
        [
            link.abort,
            lambda: threading.Thread(target=link.abort).start(),
            lambda: end.fake.comms[-1].fail(FakeNcclError(6)),
            lambda: end.fake.comms[-1].fail(KeyError(7)),
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_at_any_launch_loses_a_suffix_of_the_chunks_and_nothing_else(network: FakeNetwork, seed: int) -> None:
    choice = random.Random(seed)
    network.tells_peer = choice.random() < 0.5
    ends = make_end(network), make_end(network)
    sources = [random_blocks(NUM_BLOCKS, choice.randint(1, 80), seed) for _ in range(NUM_CHUNKS)]
    targets = [torch.zeros_like(source) for source in sources]
    orders = [choice.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2)]
    moved: tuple[list[int], list[int]] = ([], [])
    with linked(*ends) as links:
        struck = choice.randrange(2)
        fault = Fault(choose_strike(choice, ends[struck], links[struck]), choice.randint(1, NUM_CHUNKS))
        ends[struck].fake.on_launch = fault.on_launch
        calls = [
            start(lambda: move_all(links[0].send, permuted(sources, orders[0]), moved[0])),
            start(lambda: move_all(links[1].receive, permuted(targets, orders[1]), moved[1])),
        ]
        for call in calls:
            call.exception(TIMEOUT_S)
        assert all(call.exception() is None or isinstance(call.exception(), LinkLost) for call in calls)
        assert any(call.exception() is not None for call in calls), "the fault was seen"
        for target in targets[len(moved[1]) :]:
            target.fill_(1)
    order = torch.tensor(orders[0])[torch.tensor(orders[1]).argsort()]
    for index, target in enumerate(targets):
        received = index < len(moved[1])
        assert torch.equal(target, sources[index][order]) if received else target.eq(1).all()
    assert ends[0].wedged == ends[1].wedged == []


Move = Callable[[list[Tensor], float], None]


def move_all(move: Move, chunks: list[list[Tensor]], moved: list[int]) -> None:
    for index, blocks in enumerate(chunks):
        move(blocks, STALL_S)
        moved.append(index)


def permuted(chunks: list[Tensor], order: list[int]) -> list[list[Tensor]]:
    return [[chunk[index] for index in order] for chunk in chunks]
