"""A TCP link whose two ends have proven themselves: chunks of blocks, each behind a header that both ends expect."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kv_transfer.errors import LinkLost
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.byte_stream import ByteStream

_HEADER: Final = struct.Struct("!4sQQ")
"""The magic word, the chunk's number, and the number of its bytes."""
_MAGIC: Final = b"rpkv"


class TcpLink:
    """One end of a TCP link. Every chunk has a header, so that ends which disagree lose the link and nothing else."""

    def __init__(self, stream: ByteStream, path: str = "tcp") -> None:
        """path: how the bytes travel, for the log"""
        self.path: Final = path
        self._stream = stream
        self._num_chunks = 0

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Send the blocks' bytes, straight from memory; see DataLink."""
        del after  # The CPU computes in order, so there is nothing to wait for.
        buffers = [as_buffer(block) for block in blocks]
        header = memoryview(self._next_header(buffers))
        self._stream.send([header, *buffers], time.monotonic() + timeout_s)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Receive the blocks' bytes, straight into memory; see DataLink."""
        del after
        deadline_s = time.monotonic() + timeout_s
        buffers = [as_buffer(block) for block in blocks]
        expected, header = self._next_header(buffers), bytearray(_HEADER.size)
        self._stream.receive([memoryview(header)], deadline_s)
        if header != expected:
            raise LinkLost(
                f"a chunk's header is {_HEADER.unpack(header)} on the data connection; expected is "
                f"{_HEADER.unpack(expected)}"
            )
        self._stream.receive(buffers, deadline_s)

    def is_cut(self) -> bool:
        """Return whether the connection is gone; see DataLink."""
        return self._stream.is_cut()

    def abort(self) -> None:
        """Shut the connection down; calls at both ends fail. See DataLink."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _next_header(self, buffers: Sequence[memoryview]) -> bytes:
        self._num_chunks += 1
        return _HEADER.pack(_MAGIC, self._num_chunks, sum(buffer.nbytes for buffer in buffers))


def as_buffer(block: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, in place."""
    return block.view(-1).view(torch.uint8).numpy().data
