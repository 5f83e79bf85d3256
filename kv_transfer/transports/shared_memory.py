"""Links within one host: the consumer copies blocks straight out of the producer's pool.

Over a Unix socket the producer names where each block lies; the consumer copies, checks that the link still stands, and
acknowledges. The producer holds the blocks that it has named until the acknowledgement or the link's end.

Invariant: a copy counts only if the link still stood after it. The producer ends the link before it frees named blocks,
so bytes that a late consumer has read from reused blocks never count as received. No process writes another process's
pool: the pool's file is sealed against that (shared_pool.py).
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
"""The chunk's number, the number of its blocks, and whether the blocks are named or follow on the socket."""
_ACKNOWLEDGED: Final = b"a"


class SharedMemoryLink:
    """One end of a link. memory: [size] uint8, the producer's pool as this end has mapped it."""

    path: Final = "shared memory"

    def __init__(self, stream: ByteStream, memory: np.ndarray) -> None:
        self._stream = stream
        self._memory = memory
        self._num_chunks = 0

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Name the blocks, and wait until the consumer has copied them; see DataLink."""
        del after  # The CPU computes in order, so there is nothing to wait for.
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
            raise LinkLost(f"the consumer sent {bytes(acknowledgement)!r} instead of a chunk's acknowledgement")

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Copy the blocks that the producer names, and acknowledge them; see DataLink."""
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
        """Return whether the connection is gone; see DataLink."""
        return self._stream.is_cut()

    def abort(self) -> None:
        """Shut the connection down; calls at both ends fail. See DataLink."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection, and drop the mapping of the pool."""
        self._stream.close()
        self._memory = np.empty(0, dtype=np.uint8)

    def _find_runs(self, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        """Return each array's first byte in the pool and its size, [n, 2] int64; None if one is not in the pool."""
        begin = self._memory.ctypes.data
        runs = np.array([(array.ctypes.data - begin, array.nbytes) for array in arrays], dtype=np.int64)
        is_inside = (runs[:, 0] >= 0) & (runs[:, 0] + runs[:, 1] <= self._memory.nbytes)
        return runs if is_inside.all() else None

    def _receive_header(self, num_blocks: int, deadline_s: float) -> bool:
        """Return whether the blocks are named. Raises LinkLost if the header is not that of the expected chunk."""
        header = bytearray(_HEADER.size)
        self._stream.receive([memoryview(header)], deadline_s)
        self._num_chunks += 1
        number, num_named, is_named = _HEADER.unpack(header)
        if (number, num_named) != (self._num_chunks, num_blocks):
            raise LinkLost(
                f"the producer named chunk {number} of {num_named} blocks; expected is chunk {self._num_chunks} of "
                f"{num_blocks} blocks"
            )
        return bool(is_named)

    def _copy(self, runs: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        for (begin, size), target in zip(runs.tolist(), targets, strict=True):
            if size != target.nbytes or begin < 0 or begin + size > self._memory.nbytes:
                raise LinkLost(f"the producer named {size} bytes at {begin} for a block of {target.nbytes} bytes")
            np.copyto(target, self._memory[begin : begin + size])


def _as_bytes(block: Tensor) -> np.ndarray:
    array: np.ndarray = block.view(-1).view(torch.uint8).numpy()
    return array
