"""Links within one host: the consumer copies straight out of the producer's pool.

Over a Unix socket the producer names where each block lies; the consumer copies, checks that the link still stands, and
acknowledges. The producer holds what it has named until the acknowledgement or the link's end.

Invariant: a copy counts only if the link stood after it. The producer ends the link before it lets named blocks go, so
whatever a late consumer has read of reused blocks is never counted as received. Nobody writes another process's pool:
its file is sealed against that (shared_pool.py).
Blocks that are not in the pool (chunks that were gathered into a buffer) go through the socket.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_transfer.errors import LinkLost
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.byte_stream import ByteStream

_HEADER: Final = struct.Struct("!QQ?")
"""Number of the chunk, number of its blocks, whether they are named or follow on the socket."""
_ACKNOWLEDGED: Final = b"a"


class SharedMemoryLink:
    """One end of a link. memory: [size] uint8, the producer's pool as this end has mapped it."""

    path: Final = "shared memory"

    def __init__(self, stream: ByteStream, memory: np.ndarray) -> None:
        self._stream = stream
        self._memory = memory
        self._num_chunks = 0

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Name the blocks, and hold them until they have been copied."""
        del after  # The CPU computes in order.
        deadline_s = time.monotonic() + timeout_s
        arrays = [_as_bytes(block) for block in blocks]
        runs = self._find_runs(arrays)
        self._num_chunks += 1
        header = memoryview(_HEADER.pack(self._num_chunks, len(blocks), runs is not None))
        if runs is None:
            self._stream.send([header, *(array.data for array in arrays)], deadline_s)
        else:
            self._stream.send([header, memoryview(runs.tobytes())], deadline_s)
        acknowledgement = bytearray(len(_ACKNOWLEDGED))
        self._stream.receive([memoryview(acknowledgement)], deadline_s)
        if acknowledgement != _ACKNOWLEDGED:
            raise LinkLost(f"{bytes(acknowledgement)!r} came in the place of a chunk's acknowledgement")

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Copy what the producer names, and acknowledge it."""
        del after
        deadline_s = time.monotonic() + timeout_s
        arrays = [_as_bytes(block) for block in blocks]
        if self._receive_header(len(blocks), deadline_s):
            runs = np.empty((len(blocks), 2), dtype=np.int64)
            self._stream.receive([runs.data.cast("B")], deadline_s)
            self._copy(runs, arrays)
        else:
            self._stream.receive([array.data for array in arrays], deadline_s)
        if not self._stream.is_standing():
            raise LinkLost("the link ended while a chunk was copied")
        self._stream.send([memoryview(_ACKNOWLEDGED)], deadline_s)

    def is_cut(self) -> bool:
        """Whether the connection is gone."""
        return self._stream.is_cut()

    def abort(self) -> None:
        """Wake both ends."""
        self._stream.abort()

    def close(self) -> None:
        """Hang up, and let the mapping go."""
        self._stream.close()
        self._memory = np.empty(0, dtype=np.uint8)

    def _find_runs(self, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """[n, 2] int64, first byte in the pool and size of each; None if any is not in the pool."""
        begin = self._memory.ctypes.data
        runs = np.array([(array.ctypes.data - begin, array.nbytes) for array in arrays], dtype=np.int64)
        is_inside = (runs[:, 0] >= 0) & (runs[:, 0] + runs[:, 1] <= self._memory.nbytes)
        return runs if is_inside.all() else None

    def _receive_header(self, num_blocks: int, deadline_s: float) -> bool:
        """Whether the blocks are named. Raises LinkLost if they are not those that are expected."""
        header = bytearray(_HEADER.size)
        self._stream.receive([memoryview(header)], deadline_s)
        self._num_chunks += 1
        number, num_named, is_named = _HEADER.unpack(header)
        if (number, num_named) != (self._num_chunks, num_blocks):
            raise LinkLost(
                f"chunk {number} of {num_named} blocks was named, not {self._num_chunks} of {num_blocks} blocks"
            )
        return bool(is_named)

    def _copy(self, runs: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        for (begin, size), target in zip(runs.tolist(), targets, strict=True):
            if size != target.nbytes or begin < 0 or begin + size > self._memory.nbytes:
                raise LinkLost(f"{size} bytes at {begin} were named for a block of {target.nbytes} bytes")
            np.copyto(target, self._memory[begin : begin + size])


def _as_bytes(block: Tensor) -> np.ndarray:
    array: np.ndarray = block.view(-1).view(torch.uint8).numpy()
    return array
