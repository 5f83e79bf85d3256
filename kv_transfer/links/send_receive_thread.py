"""A link's data thread: opens one end of the data link, then moves one chunk after the other, each up to its deadline.

The thread reports to LinkEvents. Its last report is on_dead: from then on the transport touches no memory of this
engine. Only this thread uses the transport, except for abort() and is_cut(). If the link has checksums, the thread
computes a chunk's checksum once the chunk has moved, over the bytes as they travel: before they are scattered.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from torch import Tensor

from kv_transfer.block_pieces import StagedChunk
from kv_transfer.errors import ChunkTimeout, KVTransferError
from kv_transfer.params import TransferId
from kv_transfer.transports.base import ComputeEvent, DataLink
from kv_transfer.transports.link_opening import Opening

logger = logging.getLogger(__name__)

_LONGEST_PAUSE: Final = 1 / 3
"""How much of chunk_timeout_s a chunk may wait for its turn under a limit of the bandwidth."""


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A chunk to send or to receive for one transfer, once the device has passed `after`.

    blocks:   contiguous tensors, runs_per_block for each block or piece, in the order in which they travel
    after:    None: at once, as always on the CPU
    staged:   the chunk's way into or out of the cache; None if the blocks are the cache itself
    index:    of the chunk in its transfer
    checksum: of the bytes that have moved; None before that, and on links without checksums
    moved_s:  seconds in which the chunk moved, from its turn on; 0 before it has moved
    was_computed: whether the device had passed `after` when the chunk's turn came
    runs_per_block: 1, or for a model whose layers form several groups, those of which the link moves heads
    """

    transfer_id: TransferId
    blocks: Sequence[Tensor]
    after: ComputeEvent | None = None
    staged: StagedChunk | None = None
    attempt: int = 0
    index: int = 0
    checksum: int | None = None
    moved_s: float = 0.0
    was_computed: bool = True
    runs_per_block: int = 1

    @property
    def num_blocks(self) -> int:
        """How many blocks or pieces the chunk has."""
        return len(self.blocks) // self.runs_per_block

    @property
    def num_bytes(self) -> int:
        """The size of all blocks together."""
        return sum(block.nbytes for block in self.blocks)

    def wipe(self) -> None:
        """Zero the received bytes in the cache. Invariant: every slot of the cache holds finite numbers."""
        for block in self.blocks:
            block.zero_()
        if self.staged is not None:
            self.staged.scatter()


class LinkEvents(Protocol):
    """Takes the events of a data thread, on that thread."""

    def on_chunk_moved(self, job: ChunkJob) -> None:
        """Note that a chunk has left, or has arrived."""

    def on_dead(self, reason: str) -> None:
        """Note that the data link is closed, and why. This is called exactly once, last."""


class DataThread:
    """The thread that moves the chunks of one end of a link. It starts with the object."""

    def __init__(
        self,
        name: str,
        open_link: Callable[[Opening], DataLink],
        events: LinkEvents,
        *,
        is_sender: bool,
        chunk_timeout_s: float,
        checksum: Callable[[Sequence[Tensor]], int] | None = None,
        max_bytes_per_s: float = math.inf,
    ) -> None:
        """Start the thread.

        open_link: opens this end; runs on the thread, where it may block up to the connect timeout
        is_sender: whether this end sends; otherwise it receives
        checksum:  computes the checksum of a chunk, on the thread; None: the link has no checksums
        max_bytes_per_s: a sender pauses before each chunk for as long as the chunk takes at this bandwidth
        """
        self._events = events
        self._is_sender = is_sender
        self._chunk_timeout_s = chunk_timeout_s
        self._checksum = checksum
        self._max_bytes_per_s = max_bytes_per_s if is_sender else math.inf
        self._jobs: queue.SimpleQueue[ChunkJob | None] = queue.SimpleQueue()
        self._opening = Opening()
        self._link: DataLink | None = None
        self._aborted = threading.Event()
        self._is_waiting = False
        self.is_stalled = False
        """Whether a chunk has missed its deadline; final by the time of on_dead."""
        # open_link may own sockets, which its last reference closes. The thread drops open_link at its end. A field
        # would keep it until the garbage collector runs, because the owner's link and this object refer to each other.
        self._thread = threading.Thread(target=self._run, args=(open_link,), name=name, daemon=True)
        self._thread.start()

    def put(self, job: ChunkJob) -> None:
        """Queue a chunk; its move is reported by on_chunk_moved, or never if the link ends before."""
        self._jobs.put(job)

    @property
    def is_cut(self) -> bool:
        """Whether the transport knows that its connection is gone while no chunk moves on it; from any thread.

        While a chunk moves, or once a move has failed, the thread itself reports why the link ends.
        """
        # The thread may close its link at any time, but it clears _is_waiting before that. Read in this order, a
        # connection that this end has closed is never taken for a broken one.
        link = self._link
        return link is not None and link.is_cut() and self._is_waiting

    def abort(self) -> None:
        """End the thread as soon as the transport can; from any thread, without blocking. on_dead follows.

        Chunks that have not moved yet are dropped; a block of the chunk that was moving may be partly written.
        """
        self._aborted.set()
        self._opening.give_up()
        link = self._link
        if link is not None:
            link.abort()
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, and return whether it has ended."""
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
            # Whatever the error is, the link's transfers must be told of the link's end.
            logger.exception("a data link failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._events.on_dead(reason)

    def _move_chunks(self, link: DataLink) -> None:
        move = link.send if self._is_sender else link.receive
        while not self._aborted.is_set() and (job := self._next_job()) is not None:
            began_s, was_computed = time.monotonic(), job.after is None or job.after.query()
            if self._pause_for(job):
                return
            if job.staged is not None and self._is_sender:
                job.staged.gather()
            move(job.blocks, self._chunk_timeout_s, job.after)
            job = replace(job, moved_s=time.monotonic() - began_s, was_computed=was_computed)
            if self._checksum is not None:
                job = replace(job, checksum=self._checksum(job.blocks))
            if job.staged is not None and not self._is_sender:
                job.staged.scatter()
            self._events.on_chunk_moved(job)

    def _pause_for(self, job: ChunkJob) -> bool:
        """Wait until the chunk may be sent; return whether the thread was aborted meanwhile.

        The receiver waits for the chunk already, so the pause takes only a part of the chunk's time.
        """
        if self._max_bytes_per_s == math.inf:
            return False
        return self._aborted.wait(min(job.num_bytes / self._max_bytes_per_s, _LONGEST_PAUSE * self._chunk_timeout_s))

    def _next_job(self) -> ChunkJob | None:
        self._is_waiting = True
        job = self._jobs.get()
        self._is_waiting = False
        return job
