"""A link's data thread: opens one end, then moves one chunk after the other, each up to its deadline.

The thread reports through one callback, and its last word is on_dead: once that is out, the transport touches no memory
of this engine any more. Nobody but this thread uses the transport, except for abort(). With a checksum, each chunk's is
computed here once its bytes have moved: of the bytes as they travel, so before they are scattered.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kv_transfer.block_pieces import StagedChunk
from kv_transfer.errors import ChunkTimeout, KVTransferError
from kv_transfer.transports.base import ComputeEvent, DataLink
from kv_transfer.transports.opening import Opening

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """Blocks to send or to receive for one transfer, once the device has passed `after`.

    staged:   if the blocks are not the cache itself
    index:    of the chunk in its transfer
    checksum: of what has moved, if the link has checksums
    """

    transfer_id: str
    blocks: Sequence[Tensor]
    after: ComputeEvent | None = None
    staged: StagedChunk | None = None
    attempt: int = 0
    index: int = 0
    checksum: int | None = None

    def wipe(self) -> None:
        """Zero what was received. Invariant: no slot holds anything but finite numbers."""
        for block in self.blocks:
            block.zero_()
        if self.staged is not None:
            self.staged.scatter()


class LinkEvents(Protocol):
    """The events of a data thread, for its owner; called on the data thread."""

    def on_chunk_moved(self, job: ChunkJob) -> None:
        """A chunk has left, or has arrived."""

    def on_dead(self, reason: str) -> None:
        """The data link is closed. Comes exactly once, last."""


class DataThread:
    """One end of a link's data path."""

    def __init__(
        self,
        name: str,
        open_link: Callable[[Opening], DataLink],
        events: LinkEvents,
        *,
        is_sender: bool,
        chunk_timeout_s: float,
        checksum: Callable[[Sequence[Tensor]], int] | None = None,
    ) -> None:
        """open_link may block up to the connect timeout; it runs on the thread, as does checksum."""
        self._events = events
        self._is_sender = is_sender
        self._chunk_timeout_s = chunk_timeout_s
        self._checksum = checksum
        self._jobs: queue.SimpleQueue[ChunkJob | None] = queue.SimpleQueue()
        self._opening = Opening()
        self._link: DataLink | None = None
        self._is_aborted = False
        self._is_waiting = False
        self.is_stalled = False
        """A chunk missed its deadline. Settled by the time of on_dead."""
        # open_link may own sockets. The thread lets it go at its end; a field would keep it, because the owner's link
        # and this object refer to each other, until the garbage collector comes by.
        self._thread = threading.Thread(target=self._run, args=(open_link,), name=name, daemon=True)
        self._thread.start()

    def put(self, job: ChunkJob) -> None:
        """Queue a chunk."""
        self._jobs.put(job)

    @property
    def is_cut(self) -> bool:
        """Whether the transport knows that its connection is gone while nothing moves on it; from any thread.

        While something moves, or once that has failed, the thread itself says why the link ends.
        """
        # The thread may let its link go at any time. It stops to wait before it closes: in this order its own end of
        # the connection is never taken for a broken one.
        link = self._link
        return link is not None and link.is_cut() and self._is_waiting

    def abort(self) -> None:
        """End as soon as the transport can; from any thread, does not block."""
        self._is_aborted = True
        self._opening.give_up()
        link = self._link
        if link is not None:
            link.abort()
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; returns whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, open_link: Callable[[Opening], DataLink]) -> None:
        reason = "closed"
        try:
            self._link = open_link(self._opening)
            self._move_chunks(self._link)
        except KVTransferError as error:
            reason = str(error)
            self.is_stalled = isinstance(error, ChunkTimeout)
        except Exception as error:
            # Whatever it is, the link's transfers must hear of it.
            logger.exception("a data link broke in an unexpected way")
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._events.on_dead(reason)

    def _move_chunks(self, link: DataLink) -> None:
        move = link.send if self._is_sender else link.receive
        while not self._is_aborted and (job := self._next_job()) is not None:
            if job.staged is not None and self._is_sender:
                job.staged.gather()
            move(job.blocks, self._chunk_timeout_s, job.after)
            if self._checksum is not None:
                job = replace(job, checksum=self._checksum(job.blocks))
            if job.staged is not None and not self._is_sender:
                job.staged.scatter()
            self._events.on_chunk_moved(job)

    def _next_job(self) -> ChunkJob | None:
        self._is_waiting = True
        job = self._jobs.get()
        self._is_waiting = False
        return job
