"""Two real transfer agents hand KV over through the NCCL transport, on a fake NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.layout import KVCacheLayout, KVGroup
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.transports.base import ComputeEvent
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.reported import Reported
from tests.kv_transfer.transports.fake_nccl import FakeEvent, FakeNetwork
from tests.kv_transfer.transports.nccl_ends import TIMEOUT_S, make_end

T = TypeVar("T")

SOURCE = (17, 3, 4, 29, 8)
TARGET = (2, 3, 30, 11, 6)
NUM_TOKENS = 18
"""Five blocks of four; the last one is partial."""


class Engine:
    """An agent over a fake device, and what it has reported."""

    def __init__(self, name: str, hub: LoopbackHub, network: FakeNetwork, layout: KVCacheLayout = LAYOUT) -> None:
        self.address = EngineAddress(name, 1, name)
        self.cache = torch.zeros(layout.shape)
        self.end = make_end(network, message_size_bytes=2 * layout.block_size_bytes)
        self._output = Reported()
        self._has_news = threading.Event()
        self.agent = TransferAgent(
            KVTransferConfig(chunk_timeout_s=TIMEOUT_S, link_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S),
            self.address,
            layout,
            self.cache,
            self.end.transport,
            hub.control(self.address),
            self._has_news.set,
        )

    def wait(self, find: Callable[[Reported], T | None]) -> T:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            self._has_news.clear()
            self._output.merge(self.agent.take_output())
            if (found := find(self._output)) is not None:
                return found
            assert self._has_news.wait(max(0.0, deadline_s - time.monotonic())), f"only this came: {self._output}"


class Handover:
    """One request from prefill to decode."""

    def __init__(
        self,
        name: str,
        prefill: Engine,
        decode: Engine,
        *,
        target: tuple[int, ...] = TARGET,
        vacated: ComputeEvent | None = None,
    ) -> None:
        self.name, self._prefill, self._decode = name, prefill, decode
        producer = KVTransferParams(f"t-{name}", 0, TransferRole.PRODUCER, decode.address)
        consumer = KVTransferParams(f"t-{name}", 0, TransferRole.CONSUMER, prefill.address)
        prefill.agent.start_step(
            KVConnectorMetadata(new_producers=((TransferKey.of_handoff(name), producer, NUM_TOKENS),))
        )
        reservation = Reservation(TransferKey.of_handoff(name), consumer, target, 0, NUM_TOKENS)
        decode.agent.start_step(KVConnectorMetadata(reservations=(reservation,)), vacated)
        prefill.wait(lambda output: name in output.ready_to_prefill or None)

    def compute(self, num_before: int, num_after: int, computed: ComputeEvent | None = None) -> None:
        progress = ProducerProgress(TransferKey.of_handoff(self.name), SOURCE, num_before, num_after)
        self._prefill.agent.finish_step((progress,), computed)

    def finish(self, end: ProducerEnd = ProducerEnd.HANDED_OVER) -> None:
        token_id = 7 if end is ProducerEnd.HANDED_OVER else None
        finish = ProducerFinish(TransferKey.of_handoff(self.name), end, token_id)
        self._prefill.agent.start_step(KVConnectorMetadata(producer_finishes=(finish,)))

    def received(self) -> ReceivedKV:
        return self._decode.wait(lambda output: output.finished_recving.get(self.name))

    def sent(self) -> None:
        self._prefill.wait(lambda output: self.name in output.finished_sending or None)


@contextmanager
def engines_of(network: FakeNetwork, layout: KVCacheLayout) -> Iterator[tuple[Engine, Engine]]:
    hub = LoopbackHub()
    prefill, decode = (Engine(name, hub, network, layout) for name in ("prefill-0", "decode-0"))
    prefill.cache.copy_(torch.randn(layout.shape, generator=torch.Generator().manual_seed(0)))
    yield prefill, decode
    for engine in (prefill, decode):
        engine.agent.stop()
    network.wait_until(lambda: all(comm.is_aborted for engine in (prefill, decode) for comm in engine.end.fake.comms))


@pytest.fixture
def engines(network: FakeNetwork) -> Iterator[tuple[Engine, Engine]]:
    with engines_of(network, LAYOUT) as both:
        yield both


def expected(engines: tuple[Engine, Engine]) -> torch.Tensor:
    cache = torch.zeros_like(engines[1].cache)
    cache[list(TARGET)] = engines[0].cache[list(SOURCE)]
    return cache


def hand_over(name: str, prefill: Engine, decode: Engine, *, target: tuple[int, ...] = TARGET) -> None:
    handover = Handover(name, prefill, decode, target=target)
    handover.compute(0, NUM_TOKENS)
    handover.finish()
    assert handover.received().outcome is LoadOutcome.LOADED
    handover.sent()


def test_chunks_arrive_bit_for_bit_and_nothing_else_is_written(engines: tuple[Engine, Engine]) -> None:
    handover = Handover("a", *engines)
    for before, after in ((0, 9), (9, 13), (13, NUM_TOKENS)):
        handover.compute(before, after)
    handover.finish()
    received = handover.received()
    assert (received.outcome, received.num_valid_tokens, received.first_token_id) == (LoadOutcome.LOADED, 18, 7)
    handover.sent()
    assert torch.equal(engines[1].cache, expected(engines))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(LAYOUT, further_groups=(KVGroup(3, 1, 16, 4, "float32"),)), id="two groups"),
        pytest.param(replace(LAYOUT, num_kv_heads=1, value_size=0), id="latents"),
    ],
)
def test_the_runs_of_all_groups_share_messages_and_arrive_in_their_places(
    layout: KVCacheLayout, network: FakeNetwork
) -> None:
    """Scattered runs go through the staging buffer."""
    with engines_of(network, layout) as engines:
        handover = Handover("a", *engines)
        for before, after in ((0, 9), (9, NUM_TOKENS)):
            handover.compute(before, after)
        handover.finish()
        assert handover.received().outcome is LoadOutcome.LOADED
        handover.sent()
        assert torch.equal(engines[1].cache, expected(engines))


def test_each_chunk_waits_for_its_own_step_and_for_no_later_one(
    network: FakeNetwork, engines: tuple[Engine, Engine]
) -> None:
    """The first step is over on the device, the second is not: the first chunk arrives, the second does not."""
    steps = [FakeEvent(), FakeEvent()]
    steps[0].set()
    handover = Handover("a", *engines)
    handover.compute(0, 8, steps[0])
    handover.compute(8, NUM_TOKENS, steps[1])
    handover.finish()
    # The warm-up's two messages, and the first chunk's one, which lies in one run at both ends or is gathered before.
    network.wait_until(lambda: network.num_delivered == 3)
    assert torch.equal(engines[1].cache[list(TARGET[:2])], engines[0].cache[list(SOURCE[:2])])
    assert not engines[1].cache[list(TARGET[2:])].any()
    engines[0].cache.fill_(3.0)
    steps[1].set()
    assert handover.received().outcome is LoadOutcome.LOADED
    assert engines[1].cache[list(TARGET[2:])].eq(3.0).all()
    handover.sent()


def test_nothing_is_written_before_the_blocks_are_vacated(engines: tuple[Engine, Engine]) -> None:
    vacated = FakeEvent()
    handover = Handover("a", *engines, vacated=vacated)
    handover.compute(0, NUM_TOKENS)
    handover.finish()
    engines[1].cache.fill_(5.0)
    vacated.set()
    assert handover.received().outcome is LoadOutcome.LOADED
    assert torch.equal(engines[1].cache[list(TARGET)], engines[0].cache[list(SOURCE)])
    handover.sent()


def test_a_link_that_breaks_fails_its_transfer_and_is_rebuilt_under_a_new_id(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    handover = Handover("a", *engines)
    handover.compute(0, 8)
    # Chunks are ordered: when this one is in, the first two blocks of the other are.
    hand_over("b", prefill, decode, target=(20, 21, 22, 23, 24))
    for link in list(decode.agent._links._links.values()):
        assert link.data is not None
        link.data.abort()
    received = handover.received()
    assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 8)
    prefill.wait(lambda output: output.failed_sending.get("a"))
    handover.finish(ProducerEnd.ABORTED)
    handover.sent()
    hand_over("c", prefill, decode)
    assert torch.equal(decode.cache[list(TARGET)], prefill.cache[list(SOURCE)])
    assert [len(engine.end.fake.comms) for engine in engines] == [2, 2]
