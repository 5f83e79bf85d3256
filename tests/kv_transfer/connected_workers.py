"""Two connector workers in one process, joined by loopback or gRPC and a CPU transport, driven by the test's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import grpc.aio
import torch
from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import FetchWanted, FinishedLoading, ReceivedKV, TransferReport
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import Control, ControlStream
from kv_transfer.links.grpc_control import GrpcControl
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.sides.worker_side import WorkerSide
from kv_transfer.transfer_stats import TransferStats
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from tests.kv_transfer.reported import Reported
from tests.trusted import TRUST, member

Join = Literal["loopback", "tcp", "shared memory"]
"""The last two are one transport, over pools that are not, or are, in memory files."""
T = TypeVar("T")

_TIMEOUT_S = 60.0
_PATIENT: Final = {"link_timeout_s": 60.0, "chunk_timeout_s": 60.0, "connect_timeout_s": 60.0}
"""Unless a test sets them: an end that waits for a core, or a machine that stops for seconds, is no fault."""
_NAMES: Final = ("prefill-0", "decode-0")
LAYOUT = KVCacheLayout(
    num_blocks=32,
    num_kv_heads=2,
    num_layers=2,
    block_size=4,
    head_dim=8,
    dtype="float32",
    dtype_size_bytes=4,
    model_fingerprint="model-a",
)


class Node:
    """One engine's worker side. Everything it reports is kept, and must be reported once."""

    def __init__(
        self,
        config: KVTransferConfig,
        address: EngineAddress,
        layout: KVCacheLayout,
        control: Control,
        *,
        is_shared: bool = False,
    ) -> None:
        self.address = address
        self.control = control
        self.cache = allocate_shared_pool(layout) if is_shared else torch.zeros(layout.shape)
        self.output = Reported()
        self._seen: set[tuple[type[TransferReport], TransferKey]] = set()
        self._has_news = threading.Event()
        self.worker = WorkerSide(patient(config), address, layout, self.cache, control, self._has_news.set)

    # -- what a scheduler asks for --------------------------------------------------------------------------------

    def produce(
        self,
        request_id: str,
        consumer: EngineAddress,
        num_prompt_tokens: int,
        attempt: int = 0,
        *,
        transfer_id: str | None = None,
    ) -> None:
        ticket = KVTransferParams(transfer_id or f"t-{request_id}", attempt, TransferRole.PRODUCER, consumer)
        self._step(
            KVConnectorMetadata(new_producers=((TransferKey.of_handoff(request_id), ticket, num_prompt_tokens),))
        )

    def reserve(
        self,
        request_id: str,
        producer: EngineAddress,
        block_ids: Sequence[int],
        num_prompt_tokens: int,
        num_local_blocks: int = 0,
        *,
        transfer_id: str | None = None,
    ) -> None:
        ticket = KVTransferParams(transfer_id or f"t-{request_id}", 0, TransferRole.CONSUMER, producer)
        reservation = Reservation(
            TransferKey.of_handoff(request_id), ticket, tuple(block_ids), num_local_blocks, num_prompt_tokens
        )
        self._step(KVConnectorMetadata(reservations=(reservation,)))

    def compute(self, request_id: str, block_ids: Sequence[int], num_tokens_before: int, num_tokens_after: int) -> None:
        progress = ProducerProgress(
            TransferKey.of_handoff(request_id), tuple(block_ids), num_tokens_before, num_tokens_after
        )
        self._step(KVConnectorMetadata(progress=(progress,)))

    def finish(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> None:
        self._step(
            KVConnectorMetadata(
                producer_finishes=(ProducerFinish(TransferKey.of_handoff(request_id), end, first_token_id),)
            )
        )

    def cancel(self, request_id: str) -> None:
        self._step(KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff(request_id),)))

    def _step(self, metadata: KVConnectorMetadata) -> None:
        self.worker.start_step(metadata)
        self.worker.finish_step(metadata)

    # -- what comes back ------------------------------------------------------------------------------------------

    def wait_ready(self, request_id: str) -> None:
        self._wait(lambda output: request_id in output.ready_to_prefill or None)

    def wait_finished_sending(self, request_id: str) -> None:
        self._wait(lambda output: request_id in output.finished_sending or None)

    def wait_failed_sending(self, request_id: str) -> str:
        return self._wait(lambda output: output.failed_sending.get(request_id))

    def wait_received(self, request_id: str) -> ReceivedKV:
        return self._wait(lambda output: output.finished_recving.get(request_id))

    def stats(self) -> TransferStats:
        self._collect()
        return self.output.stats or TransferStats()

    def wait_stats(self, are_so: Callable[[TransferStats], bool]) -> TransferStats:
        """Only what changes a link, or is reported, wakes the one who waits: so it looks now and then as well."""
        return self._wait(lambda output: output.stats if output.stats and are_so(output.stats) else None, 0.05)

    def streams(self) -> list[ControlStream]:
        """The control streams of every link of this end, to say what its agent would not."""
        return [link.stream for link in self.worker._agent._links._links.values()]

    def grow_impatient(self, chunk_timeout_s: float) -> None:
        """From now on so short a stall of a chunk ends a link that is up; later links are as patient as before."""
        for link in list(self.worker._agent._links._links.values()):
            assert link.data is not None
            link.data._chunk_timeout_s = chunk_timeout_s

    def abort_links(self) -> None:
        """Break every data link of this end, as the network might."""
        for link in list(self.worker._agent._links._links.values()):
            if link.data is not None:
                link.data.abort()

    def _wait(self, find: Callable[[Reported], T | None], look_every_s: float = _TIMEOUT_S) -> T:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            self._has_news.clear()
            self._collect()
            if (found := find(self.output)) is not None:
                return found
            assert time.monotonic() < deadline_s, f"only this came: {self.output}"
            self._has_news.wait(look_every_s)

    def _collect(self) -> None:
        news = self.worker.take_output()
        reports = [
            (type(report), report.key)
            for report in news.reports
            if not isinstance(report, FetchWanted | FinishedLoading)
        ]
        twice = [report for index, report in enumerate(reports) if report in self._seen or report in reports[:index]]
        assert not twice, f"reported twice: {twice}"
        self._seen.update(reports)
        self.output.merge(news)


@dataclass(frozen=True, slots=True)
class Pair:
    """P's cache is random and D's is zero."""

    producer: Node
    consumer: Node

    def hand_over(
        self, request_id: str, source_ids: Sequence[int], target_ids: Sequence[int], num_prompt_tokens: int
    ) -> ReceivedKV:
        """One whole transfer in one chunk, up to both reports."""
        self.begin(request_id, target_ids, num_prompt_tokens)
        self.producer.compute(request_id, source_ids, 0, num_prompt_tokens)
        self.producer.finish(request_id, ProducerEnd.HANDED_OVER, 7)
        received = self.consumer.wait_received(request_id)
        self.producer.wait_finished_sending(request_id)
        return received

    def begin(
        self, request_id: str, target_ids: Sequence[int], num_prompt_tokens: int, num_local_blocks: int = 0
    ) -> None:
        """Both ends know the request, and READY is in."""
        self.producer.produce(request_id, self.consumer.address, num_prompt_tokens)
        self.consumer.reserve(request_id, self.producer.address, target_ids, num_prompt_tokens, num_local_blocks)
        self.producer.wait_ready(request_id)

    def expected_cache(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> Tensor:
        """D's cache if these blocks were copied and nothing else was touched."""
        expected = torch.zeros_like(self.consumer.cache)
        expected[list(target_ids)] = self.producer.cache[list(source_ids)]
        return expected


def patient(config: KVTransferConfig) -> KVTransferConfig:
    """Deadlines that no busy machine misses, but for those that the test has set."""
    unset = {name: value for name, value in _PATIENT.items() if name not in config.model_fields_set}
    return config.model_copy(update=unset)


@contextmanager
def connected_pair(
    join: Join,
    config: KVTransferConfig | None = None,
    *,
    producer_layout: KVCacheLayout = LAYOUT,
    consumer_layout: KVCacheLayout = LAYOUT,
    consumer_config: KVTransferConfig | None = None,
) -> Iterator[Pair]:
    """P and D, shut down at the end. consumer_config: if it is another than the producer's."""
    config = config or KVTransferConfig()
    transport = {"transport": "tcp" if join == "shared memory" else join}
    configs = [end.model_copy(update=transport) for end in (config, consumer_config or config)]
    with _loopback_controls() if join == "loopback" else _grpc_controls() as ends:
        nodes: list[Node] = []
        try:
            layouts = (producer_layout, consumer_layout)
            for end_config, (address, control), layout in zip(configs, ends, layouts, strict=True):
                nodes.append(Node(end_config, address, layout, control, is_shared=join == "shared memory"))
            nodes[0].cache.copy_(torch.randn(producer_layout.shape, generator=torch.Generator().manual_seed(0)))
            yield Pair(*nodes)
        finally:
            for node in nodes:
                node.worker.shutdown()


_Ends = list[tuple[EngineAddress, Control]]


@contextmanager
def _loopback_controls() -> Iterator[_Ends]:
    hub = LoopbackHub()
    addresses = [EngineAddress(name, 1, name) for name in _NAMES]
    yield [(address, hub.control(address)) for address in addresses]


@contextmanager
def _grpc_controls() -> Iterator[_Ends]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-loop")
    thread.start()
    try:
        servers = [asyncio.run_coroutine_threadsafe(_serve(loop, name), loop).result(_TIMEOUT_S) for name in _NAMES]
        try:
            yield [
                (EngineAddress(name, 1, f"127.0.0.1:{port}"), control)
                for name, (_, control, port) in zip(_NAMES, servers, strict=True)
            ]
        finally:
            for server, control, _ in servers:
                asyncio.run_coroutine_threadsafe(_stop(server, control), loop).result(_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_TIMEOUT_S)
        loop.close()


async def _serve(loop: asyncio.AbstractEventLoop, name: str) -> tuple[grpc.aio.Server, GrpcControl, int]:
    acceptor = GrpcAcceptor(TRUST)
    control, server = GrpcControl(loop, member(name), acceptor, link_timeout_s=60.0), grpc.aio.server()
    server.add_generic_rpc_handlers((control.handler(), acceptor.handler()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, control, port


async def _stop(server: grpc.aio.Server, control: GrpcControl) -> None:
    await control.close()
    await server.stop(0)
