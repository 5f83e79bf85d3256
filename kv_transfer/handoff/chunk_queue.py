"""Which chunk a producer announces next on a link: the link's transfers take turns.

What has been announced is sent in that order, so little is announced ahead of what has left: two chunks, that the data
thread always finds the next one, or as many small ones as weigh no more than two full ones. A short transfer behind a
long one waits for those, and from then on for one chunk of each other transfer at a time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from kv_transfer.transports.base import ComputeEvent

_NUM_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class QueuedChunk:
    """Blocks of one transfer that may leave. after: on a device, where they are computed."""

    transfer_id: str
    first_block: int
    block_ids: tuple[int, ...]
    size_bytes: int
    after: ComputeEvent | None = None


class ChunkQueue:
    """Of one link. Each transfer's chunks keep their order."""

    def __init__(self, max_chunk_bytes: int) -> None:
        """max_chunk_bytes: of a full chunk."""
        self._max_ahead_bytes = _NUM_AHEAD * max_chunk_bytes
        self._waiting: OrderedDict[str, deque[QueuedChunk]] = OrderedDict()
        """Invariant: none is empty, and the first one's turn is next."""
        self._ahead: deque[int] = deque()
        self._ahead_bytes = 0

    def put(self, chunk: QueuedChunk) -> None:
        """Queue a chunk behind those of its transfer."""
        self._waiting.setdefault(chunk.transfer_id, deque()).append(chunk)

    def take(self) -> QueuedChunk | None:
        """The chunk to announce now; None if there is none, or enough is announced."""
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
        """The oldest announced chunk has left."""
        self._ahead_bytes -= self._ahead.popleft()

    def drop(self, transfer_id: str) -> None:
        """Forget a transfer's chunks that are not announced."""
        self._waiting.pop(transfer_id, None)
