"""When an engine takes the NCCL transport, and what its connector does beside it: events, and links that are wedged.

Tests of kv_transfer/sides/worker_side.py, kv_transfer/transports/loopback.py, kv_transfer/transports/nccl_device.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.device_kind import mark_stream
from kv_transfer.errors import LinkLost, TransportUnavailable, TransportWedged
from kv_transfer.links.control_streams import Control, ControlStream, StreamEvents
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from kv_transfer.sides import worker_side
from kv_transfer.sides.worker_side import make_transport
from kv_transfer.transports.base import ComputeEvent, Transport
from kv_transfer.transports.loopback import Pipe
from kv_transfer.trust.refusals import Refusals
from tests.kv_transfer.connected_workers import Pair, connected_pair
from tests.kv_transfer.transports.fake_nccl import FakeEnd, FakeEvent, FakeNetwork
from tests.kv_transfer.transports.ipv6 import has_ipv6

ADDRESS = EngineAddress("prefill-0", 1, "127.0.0.1:5000")


class NoControl:
    """A control that joins engines of different processes."""

    tls = None
    refusals = Refusals()

    def serve(self, events: StreamEvents) -> None:
        raise AssertionError("not here")

    def dial(self, peer: EngineAddress, events: StreamEvents) -> ControlStream:
        raise AssertionError("not here")


class CudaCache:
    """The part of a tensor that the choice looks at."""

    device = torch.device("cuda", 1)


def choose(
    transport: Literal["auto", "loopback", "nccl", "tcp"], cache: object, control: Control | None = None
) -> Transport:
    config = KVTransferConfig(transport=transport)
    return make_transport(config, ADDRESS, control or NoControl(), cache, pytest.fail)  # type: ignore[arg-type]  # CudaCache


def test_auto_takes_nccl_on_a_gpu(monkeypatch: pytest.MonkeyPatch, network: FakeNetwork) -> None:
    monkeypatch.setattr(worker_side, "load_nccl", lambda: FakeEnd(network).nccl)
    assert choose("auto", CudaCache()).name == choose("nccl", CudaCache()).name == "nccl"


def test_auto_takes_no_nccl_on_the_cpu() -> None:
    assert choose("auto", torch.zeros(1)).name != "nccl"


def test_nccl_on_the_cpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(TransportUnavailable) as refusal:
        choose("nccl", torch.zeros(1))
    assert str(refusal.value) == (
        "kv_transfer.transport = 'nccl' moves GPU memory, but this engine's KV cache is on cpu: run it on a GPU "
        "(model.device = 'cuda', with a torch for CUDA, pip install 'raypd[cuda12]' or 'raypd[cuda13]' as "
        "torch.version.cuda says), or use 'auto'"
    )


def test_nccl_without_cupy_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransportUnavailable, match=r"cupy is missing \(.*\); pip install 'raypd\[cuda13\]'$"):
        choose("auto", CudaCache())


def test_tcp_on_a_gpu_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match="'tcp' moves CPU memory, but this engine's KV cache is on cuda:1"):
        choose("tcp", CudaCache())


def test_an_ipv6_address_loses_the_brackets_that_it_has_before_a_port() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1")
    address = EngineAddress("decode-0", 1, "[::1]:50051")
    transport = make_transport(KVTransferConfig(), address, NoControl(), torch.zeros(1), pytest.fail)
    pending = transport.listen()
    assert pending.rendezvous.startswith("::1|")
    with pytest.raises(LinkLost):
        pending.accept(0.01)


def test_nccl_within_one_process_is_refused() -> None:
    control = LoopbackHub().control(ADDRESS)
    with pytest.raises(TransportUnavailable, match="joined by loopback, not by nccl"):
        choose("nccl", CudaCache(), control)


# -- the connector -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected_pair("loopback") as connected:
        yield connected


Move = Callable[[Pipe, Sequence[Tensor], float, ComputeEvent | None], None]


def spy(move: Move, afters: list[ComputeEvent | None]) -> Move:
    def moved(pipe: Pipe, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None) -> None:
        afters.append(after)
        move(pipe, blocks, timeout_s, after)

    return moved


def test_on_the_cpu_no_event_is_recorded() -> None:
    assert mark_stream(torch.device("cpu")) is None


def test_every_chunk_carries_the_event_of_its_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[FakeEvent] = []

    def mark(device: torch.device) -> FakeEvent:
        marks.append(FakeEvent())
        return marks[-1]

    monkeypatch.setattr(worker_side, "mark_stream", mark)
    moved: dict[str, list[ComputeEvent | None]] = {"send": [], "receive": []}
    for name, afters in moved.items():
        monkeypatch.setattr(Pipe, name, spy(getattr(Pipe, name), afters))
    pair.producer.produce("a", pair.consumer.address, 8)  # mark 0
    pair.consumer.reserve("a", pair.producer.address, (5, 6), 8)  # mark 1
    pair.producer.wait_ready("a")
    pair.producer.compute("a", (1, 2), 4, 8)  # marks 2 and 3: before and after the forward
    pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
    assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
    pair.producer.wait_finished_sending("a")
    assert moved == {"send": [marks[2], marks[3]], "receive": [marks[1], marks[1]]}


def test_a_wedged_link_ends_the_engine_though_the_agent_lives(pair: Pair) -> None:
    pair.consumer.worker._on_wedged("an NCCL link could not be aborted within 10 s")
    assert pair.consumer._has_news.is_set(), "the engine thread is woken"
    with pytest.raises(TransportWedged, match="could not be aborted"):
        pair.consumer.worker.take_output()
