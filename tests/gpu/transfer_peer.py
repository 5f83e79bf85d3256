"""One engine's worker side in a process of its own: a cache on a device, a connector, and a scheduler's part of calls.

The process's main thread plays the engine thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.layout import KVCacheLayout
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.sides.worker_side import WorkerSide
from kv_transfer.trust.membership import TrustMaterial
from tests.gpu.control_server import ControlServer
from tests.kv_transfer.reported import Reported

T = TypeVar("T")

_WAIT_TIMEOUT_S = 50.0
_CYCLES_PER_S = 2e9
"""About; of torch.cuda._sleep()."""


class TransferPeer:
    """layout.num_blocks blocks of zeros. device: of torch; on the CPU, this file itself can be tried."""

    def __init__(
        self, device: str, engine_id: str, layout: KVCacheLayout, config: KVTransferConfig, material: TrustMaterial
    ) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._layout = layout
        self._cache = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype), device=self._device)
        self._server = ControlServer(engine_id, material)  # gRPC stops a server that nobody holds
        self._address = EngineAddress(engine_id, 1, self._server.address)
        self._output = Reported()
        self._has_news = threading.Event()
        self._worker = WorkerSide(config, self._address, layout, self._cache, self._server.control, self._has_news.set)

    def address(self) -> EngineAddress:
        return self._address

    # -- what a scheduler asks for ---------------------------------------------------------------------------------

    def produce(self, request_id: str, consumer: EngineAddress, num_prompt_tokens: int) -> None:
        ticket = KVTransferParams(f"t-{request_id}", 0, TransferRole.PRODUCER, consumer)
        self._step(
            KVConnectorMetadata(new_producers=((TransferKey.of_handoff(request_id), ticket, num_prompt_tokens),))
        )

    def reserve(
        self, request_id: str, producer: EngineAddress, block_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        ticket = KVTransferParams(f"t-{request_id}", 0, TransferRole.CONSUMER, producer)
        reservation = Reservation(TransferKey.of_handoff(request_id), ticket, tuple(block_ids), 0, num_prompt_tokens)
        self._step(KVConnectorMetadata(reservations=(reservation,)))

    def compute(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: tuple[int, int],
        seed: int,
        sleep_s: float = 0.0,
    ) -> None:
        """A step that fills the blocks of these tokens (from, to). The device first sleeps; the host does not."""
        before, after = num_tokens
        metadata = KVConnectorMetadata(
            progress=(ProducerProgress(TransferKey.of_handoff(request_id), tuple(block_ids), before, after),)
        )
        self._worker.start_step(metadata)
        filled = list(block_ids[before // self._layout.block_size : -(-after // self._layout.block_size)])
        shape = (len(filled), *self._layout.shape[1:])
        content = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self._cache)
        index = torch.tensor(filled, device=self._device)
        # Everything from here on is only queued.
        if sleep_s and self._device.type == "cuda":
            torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]  # torch's own
        self._cache.index_copy_(0, index, content)
        self._worker.finish_step(metadata)

    def finish(self, request_id: str, end: ProducerEnd) -> None:
        token_id = 7 if end is ProducerEnd.HANDED_OVER else None
        self._step(
            KVConnectorMetadata(producer_finishes=(ProducerFinish(TransferKey.of_handoff(request_id), end, token_id),))
        )

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Do what the engine does with blocks that are its own again."""
        self._cache[list(block_ids)] = value

    # -- what comes back -------------------------------------------------------------------------------------------

    def wait_ready(self, request_id: str) -> None:
        self._wait(lambda output: request_id in output.ready_to_prefill or None)

    def wait_finished_sending(self, request_id: str) -> None:
        self._wait(lambda output: request_id in output.finished_sending or None)

    def wait_failed_sending(self, request_id: str) -> str:
        return self._wait(lambda output: output.failed_sending.get(request_id))

    def wait_received(self, request_id: str) -> ReceivedKV:
        return self._wait(lambda output: output.finished_recving.get(request_id))

    def digests(self) -> list[str]:
        """One for each block of the cache."""
        blocks = self._cache.view(self._layout.num_blocks, -1).view(torch.uint8).cpu()
        return [hashlib.sha256(block.numpy().tobytes()).hexdigest() for block in blocks]

    def product_is_right(self) -> bool:
        """Whether the device still computes."""
        a = torch.ones(256, 256, device=self._device)
        return bool((a @ a).eq(256).all())

    def _step(self, metadata: KVConnectorMetadata) -> None:
        self._worker.start_step(metadata)
        self._worker.finish_step(metadata)

    def _wait(self, find: Callable[[Reported], T | None]) -> T:
        deadline_s = time.monotonic() + _WAIT_TIMEOUT_S
        while True:
            self._has_news.clear()
            self._output.merge(self._worker.take_output())
            if (found := find(self._output)) is not None:
                return found
            assert self._has_news.wait(max(0.0, deadline_s - time.monotonic())), f"only this came: {self._output}"
