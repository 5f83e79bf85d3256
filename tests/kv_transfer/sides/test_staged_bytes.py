"""Bytes that are no KV go over every kind of link, through blocks that are clean before and after.

Tests of kv_transfer/connector/interface.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.fetches import BytesFetch, WantedFetch
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import KVConnectorMetadata, Reservation, StagedBytes
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.prefix.prefix_fetch import FetchAnswer, add_fetches
from kv_transfer.sides.rank_parts import RankParts
from kv_transfer.sides.staged_bytes import StagingSide
from kv_transfer.sides.worker_side import WorkerSide
from tests.kv_transfer.connected_workers import LAYOUT, patient
from tests.kv_transfer.reported import Reported
from tests.kv_transfer.transports.fake_nccl import FakeEvent, FakeNetwork
from tests.kv_transfer.transports.nccl_ends import make_end

_TIMEOUT_S = 60.0
_SLOT_BYTES = LAYOUT.num_kv_heads * LAYOUT.token_size_bytes


class End:
    """One engine's worker side, driven by the test's thread."""

    def __init__(
        self,
        name: str,
        layout: KVCacheLayout,
        make: Callable[[EngineAddress, KVCacheLayout, Tensor, Callable[[], None]], KVConnectorWorker],
    ) -> None:
        self.address = EngineAddress(name, 1, name)
        self.layout = layout
        self.cache = torch.zeros(layout.shape)
        self.output = Reported()
        self._has_news = threading.Event()
        links = make(self.address, layout, self.cache, self._has_news.set)
        self.worker = StagingSide(RankParts(links, layout), self.cache)

    def step(self, metadata: KVConnectorMetadata) -> None:
        self.worker.start_step(metadata)
        self.worker.finish_step(metadata)

    def wait(self, is_so: Callable[[Reported], object]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            self._has_news.clear()
            self.output.merge(self.worker.take_output())
            if is_so(self.output):
                return
            assert self._has_news.wait(max(0.0, deadline_s - time.monotonic())), f"only this came: {self.output}"

    def num_blocks_for(self, data: bytes) -> int:
        return -(-len(data) // (_SLOT_BYTES * self.layout.block_size))


class AgentWorker:
    """An agent over a fake device, as WorkerSide has one over a real one."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self.take_output = agent.take_output
        self.shutdown = agent.stop

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        self._agent.start_step(metadata, _mark_compute())

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        self._agent.finish_step(metadata.progress, _mark_compute())


def _mark_compute() -> FakeEvent:
    event = FakeEvent()
    event.set()
    return event


@pytest.fixture(params=["loopback", "nccl"])
def make_ends(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int], tuple[End, End]]]:
    """Ends that send and fetch, by the sizes of their blocks. TCP, shared memory: actors/test_encode_engines.py."""
    hub, network, made = LoopbackHub(), FakeNetwork(), list[End]()
    settings = patient(KVTransferConfig(checksum=request.param == "loopback", max_chunk_bytes=1000))

    def make_worker(
        address: EngineAddress, layout: KVCacheLayout, cache: Tensor, on_progress: Callable[[], None]
    ) -> KVConnectorWorker:
        control = hub.control(address)
        if request.param == "loopback":
            return WorkerSide(settings, address, layout, cache, control, on_progress)
        end = make_end(network)
        agent = TransferAgent(settings, address, layout, cache, end.transport, control, on_progress)
        return AgentWorker(agent)

    def make(*block_sizes: int) -> tuple[End, End]:
        for name, block_size in zip(("encode", "prefill"), block_sizes, strict=True):
            made.append(End(name, replace(LAYOUT, block_size=block_size), make_worker))
        return made[0], made[1]

    yield make
    for end in made:
        end.worker.shutdown()


def begin_fetch(sender: End, fetcher: End, data: bytes) -> tuple[TransferKey, WantedFetch]:
    """Reserve blocks for so many bytes, and wait until the sender is asked for them."""
    name = TransferKey(TransferKind.BYTES_FETCH, "fetch-1")
    params = KVTransferParams("fetch-1", 0, TransferRole.CONSUMER, sender.address)
    blocks = tuple(random.Random(1).sample(range(fetcher.layout.num_blocks), fetcher.num_blocks_for(data)))
    reservation = Reservation(name, params, blocks, 0, -(-len(data) // _SLOT_BYTES), BytesFetch("fetch-1", "cat"))
    fetcher.step(KVConnectorMetadata(reservations=(reservation,)))
    sender.wait(lambda output: output.wants)
    [want] = sender.output.wants
    assert want.fetch == BytesFetch("fetch-1", "cat")
    return name, want


def send(sender: End, want: WantedFetch, data: bytes) -> None:
    blocks = tuple(random.Random(2).sample(range(sender.layout.num_blocks), sender.num_blocks_for(data)))
    metadata = add_fetches(KVConnectorMetadata(), (), (), [FetchAnswer(want, blocks, -(-len(data) // _SLOT_BYTES))])
    sender.step(replace(metadata, staged=(StagedBytes(want.answer_key, blocks, data),) if data else ()))


@pytest.mark.parametrize("num_bytes", [1, _SLOT_BYTES, 5 * _SLOT_BYTES + 3, 16 * _SLOT_BYTES])
@pytest.mark.parametrize("block_sizes", [(4, 4), (8, 2), (2, 8)])
def test_bytes_arrive_as_they_were_and_leave_no_trace(
    block_sizes: tuple[int, int], num_bytes: int, make_ends: Callable[[int, int], tuple[End, End]]
) -> None:
    sender, fetcher = make_ends(*block_sizes)
    data = random.Random(num_bytes).randbytes(num_bytes)
    name, want = begin_fetch(sender, fetcher, data)
    send(sender, want, data)
    fetcher.wait(lambda output: name in output.finished_recving)
    sender.wait(lambda output: want.answer_key in output.finished_sending)
    assert fetcher.output.finished_recving[name].outcome is LoadOutcome.LOADED
    assert fetcher.output.received_bytes[name][:num_bytes] == data
    assert len(fetcher.output.received_bytes[name]) < num_bytes + _SLOT_BYTES
    assert not sender.cache.any()
    assert not fetcher.cache.any()


def test_nothing_is_read_if_nothing_was_sent(make_ends: Callable[[int, int], tuple[End, End]]) -> None:
    sender, fetcher = make_ends(4, 4)
    name, want = begin_fetch(sender, fetcher, b"expected")
    send(sender, want, b"")
    fetcher.wait(lambda output: name in output.finished_recving)
    sender.wait(lambda output: want.answer_key in output.finished_sending)
    assert fetcher.output.finished_recving[name].num_valid_tokens == 0
    assert fetcher.output.received_bytes == {}


def test_a_fetch_that_is_cancelled_before_the_answer_is_over_at_both_ends(
    make_ends: Callable[[int, int], tuple[End, End]],
) -> None:
    sender, fetcher = make_ends(4, 4)
    data = bytes(range(200))
    name, want = begin_fetch(sender, fetcher, data)
    fetcher.step(KVConnectorMetadata(consumer_cancels=(name,)))
    fetcher.wait(lambda output: name in output.finished_recving)
    # Its answer is late now: nobody is there to get it, and it is over at once.
    send(sender, want, data)
    sender.wait(lambda output: want.answer_key in output.finished_sending)
    assert fetcher.output.finished_recving[name].outcome is LoadOutcome.CANCELLED
    assert fetcher.output.received_bytes == {}
    assert not sender.cache.any()
    assert not fetcher.cache.any()
