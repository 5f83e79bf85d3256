"""The order in which a producer announces chunks on a link: the link's transfers take turns.

Chunks are sent in the order in which they were announced. So few chunks are announced before earlier ones have left:
two, so that the data thread always finds the next one, or as many small chunks as have together no more bytes than two
full ones. A short transfer behind a long one waits for these, and from then on for one chunk of each other transfer at
a time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from kv_transfer.params import TransferId
from kv_transfer.transports.base import ComputeEvent

_NUM_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class QueuedChunk:
    """Blocks of one transfer that may leave.

    first_block: the first block's index in the prompt
    size_bytes:  of all the chunk's blocks together
    after:       the point on the device's compute stream at which the blocks are computed; None on the CPU
    """

    transfer_id: TransferId
    first_block: int
    block_ids: tuple[int, ...]
    size_bytes: int
    after: ComputeEvent | None = None


class ChunkQueue:
    """The chunks of one link that are not announced yet. Each transfer's chunks keep their order."""

    def __init__(self, max_chunk_bytes: int) -> None:
        """max_chunk_bytes: size of a full chunk."""
        self._max_ahead_bytes = _NUM_AHEAD * max_chunk_bytes
        self._waiting: OrderedDict[TransferId, deque[QueuedChunk]] = OrderedDict()
        """The chunks of each transfer. Invariant: no queue is empty, and the first transfer's turn is next."""
        self._ahead: deque[int] = deque()
        """The sizes in bytes of the chunks that are announced and have not left."""
        self._ahead_bytes = 0

    def put(self, chunk: QueuedChunk) -> None:
        """Queue a chunk behind its transfer's other chunks."""
        self._waiting.setdefault(chunk.transfer_id, deque()).append(chunk)

    def take(self) -> QueuedChunk | None:
        """Return the chunk to announce now; None if none is queued, or enough chunks are announced."""
        if not self._waiting:
            return None
        transfer_id, chunks = next(iter(self._waiting.items()))
        is_light = self._ahead_bytes + chunks[0].size_bytes <= self._max_ahead_bytes
        if len(self._ahead) >= _NUM_AHEAD and not is_light:
            return None
        chunk = chunks.popleft()
        if chunks:
            self._waiting.move_to_end(transfer_id)
        else:
            del self._waiting[transfer_id]
        self._ahead.append(chunk.size_bytes)
        self._ahead_bytes += chunk.size_bytes
        return chunk

    def on_sent(self) -> None:
        """Note that the oldest announced chunk has left."""
        self._ahead_bytes -= self._ahead.popleft()

    def drop(self, transfer_id: TransferId) -> int:
        """Drop a transfer's chunks that are not announced; return their bytes."""
        return sum(chunk.size_bytes for chunk in self._waiting.pop(transfer_id, ()))
