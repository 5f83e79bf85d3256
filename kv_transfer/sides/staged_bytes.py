"""Sends bytes that are no KV like KV: they are staged in blocks of the KV cache for as long as a link moves them.

So such bytes use the same links, memory, checksums and deadlines as KV. A transfer of staged bytes is a fetch
(connector/fetches.py) that names the bytes. The engine that has the bytes stages them when READY has arrived; the
engine that fetches them reads them out of its blocks when the load is reported. At both ends the blocks belong to no
request, and go back to the scheduler with the same reports.

The bytes run through the blocks token by token, so that they arrive in order at an engine with another block size.
Invariant: a slot of a free block holds finite numbers. Arbitrary bytes may be none, so blocks are zeroed before they
are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import (
    FinishedReceiving,
    FinishedSending,
    KVConnectorOutput,
    LoadOutcome,
    TransferReport,
)
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.device_kind import pin_for


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The blocks into which bytes are fetched, and how many slots (tokens) of them the bytes take."""

    block_ids: tuple[int, ...]
    num_tokens: int


class StagingSide:
    """A KVConnectorWorker around another one, which moves the blocks.

    The object belongs to the thread that steps, like the KV cache itself.
    """

    def __init__(self, links: KVConnectorWorker, kv_cache: Tensor) -> None:
        """links: moves the blocks; kv_cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]"""
        self._links = links
        self._blocks = kv_cache.view(_widest_word(kv_cache.shape[-1] * kv_cache.itemsize))
        self._slots = self._blocks.permute(0, 4, 1, 2, 3, 5)
        self._sending: dict[TransferKey, tuple[int, ...]] = {}
        self._awaited: dict[TransferKey, _Awaited] = {}

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Write the bytes that this step sends into their blocks, then begin what the step asks for."""
        for staged in metadata.staged:
            self._write(staged.block_ids, staged.data)
            self._sending[staged.key] = staged.block_ids
        for reservation in metadata.reservations:
            if reservation.key.kind is TransferKind.BYTES_FETCH:
                awaited = _Awaited(reservation.block_ids, reservation.num_prompt_tokens)
                self._awaited[reservation.key] = awaited
        self._links.start_step(replace(metadata, staged=()) if metadata.staged else metadata)

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that the step's forward pass has completed."""
        self._links.finish_step(metadata)

    def take_output(self) -> KVConnectorOutput:
        """Return the reports since the last call, with the bytes that have come; zero the blocks that held bytes."""
        output = self._links.take_output()
        if self._sending or self._awaited:
            output.reports = [self._with_bytes(report) for report in output.reports]
        return output

    def shutdown(self) -> None:
        """Close every link."""
        self._links.shutdown()

    def _with_bytes(self, report: TransferReport) -> TransferReport:
        """Add the received bytes to a report of their fetch; zero the blocks of a transfer that is over."""
        match report:
            case FinishedSending(key) if key in self._sending:
                self._wipe(self._sending.pop(key))
            case FinishedReceiving(key, received) if key in self._awaited:
                awaited = self._awaited.pop(key)
                if received.outcome is LoadOutcome.LOADED and received.num_valid_tokens == awaited.num_tokens:
                    report = FinishedReceiving(key, received, self._read(awaited))
                self._wipe(awaited.block_ids)
        return report

    def _write(self, block_ids: Sequence[int], data: bytes) -> None:
        staged = torch.zeros((len(block_ids), *self._slots.shape[1:]), dtype=self._slots.dtype)
        staged.view(-1).view(torch.uint8).numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        device = self._slots.device
        self._slots[self._index(block_ids)] = pin_for(device, staged).to(device, non_blocking=True)

    def _read(self, awaited: _Awaited) -> bytes:
        staged = self._slots[self._index(awaited.block_ids)].flatten(0, 1)[: awaited.num_tokens]
        return staged.contiguous().cpu().numpy().tobytes()

    def _wipe(self, block_ids: Sequence[int]) -> None:
        self._blocks.index_fill_(0, self._index(block_ids), 0)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        device = self._slots.device
        return pin_for(device, torch.tensor(block_ids, dtype=torch.int64)).to(device, non_blocking=True)


def _widest_word(run_bytes: int) -> torch.dtype:
    """Return the widest integer dtype whose size divides run_bytes: torch gathers and scatters element by element."""
    words = (torch.int64, torch.int32, torch.int16)
    return next((word for word in words if run_bytes % word.itemsize == 0), torch.uint8)
