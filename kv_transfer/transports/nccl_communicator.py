"""One two-rank NCCL communicator, its stream, and the one thread that calls NCCL for it.

Any NCCL call may block the host for good: initialisation until the peer does the same, a group's end until the peer has
connected. So no call is made on the link's own thread. The link's thread hands its exchanges to the owner thread and
waits for them, each wait with a deadline; after the deadline the link's thread aborts. Invariants:

- The owner thread alone calls NCCL. abort() is the exception that NCCL allows; it runs on a thread of its own, because
  an abort may hang, too. This thread waits a moment for the owner to leave NCCL, and then aborts in any case: nothing
  else may be able to wake the owner.
- A communicator is never dropped without an abort: its destructor would wait for a peer that may be gone.
- An exchange counts only if nothing was aborted, and no error was reported, when the device had passed its end: an
  abort makes kernels leave with buffers in any state.
- "Quiet" is set only when nothing more will be queued and the device has passed everything that was queued: from then
  on nothing of this communicator touches memory. An abort that hangs after that costs a thread, not the engine.

    opening -> open -> aborting -> quiet;   opening -> aborting -> (whenever initialisation comes back) quiet
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from kv_transfer.errors import ChunkTimeout, KVTransferError, LinkLost
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.nccl_device import Device, DeviceEvent, DeviceStream
from kv_transfer.transports.nccl_library import NcclComm, NcclLibrary
from kv_transfer.transports.nccl_messages import STAGING_SIZE_BYTES, Message, Placement, cut_groups, place

logger = logging.getLogger(__name__)

_NUM_RANKS: Final = 2
_ABORT_GRACE_S: Final = 1.0
_MIN_PAUSE_S: Final = 50e-6
_MAX_PAUSE_S: Final = 1e-3
_WARM_UP_REPEATS: Final = 128
"""How often a digest of 32 bytes is repeated in the greeting: 4 KiB go in each direction."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    messages: Sequence[Message]
    is_send: bool
    deadline_s: float
    after: ComputeEvent | None
    done: Future[None] = field(default_factory=Future)


class Communicator:
    """One end of a communicator. The link's own thread calls open(), exchange() and close(), any thread abort()."""

    def __init__(
        self, library: NcclLibrary, device: Device, unique_id: bytes, rank: int, launch_lock: threading.Lock
    ) -> None:
        """rank: 0 or 1; launch_lock: one for all communicators of the device in this process"""
        self._library = library
        self._device = device
        self._unique_id = unique_id
        self._rank = rank
        self._launch_lock = launch_lock
        self._lock = threading.Lock()
        self._calls = threading.Lock()  # held by the owner thread while it is inside NCCL
        self._exchanges: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._comm: NcclComm | None = None
        self._stream: DeviceStream | None = None
        self._staging: Tensor | None = None
        self._last_queued: DeviceEvent | None = None
        self._opened: Future[None] = Future()
        self._aborting = threading.Event()
        self._aborted = threading.Event()
        self._quiet = threading.Event()
        self._owner = threading.Thread(target=self._run, name="nccl-owner", daemon=True)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of the communicator touches memory any more."""
        return self._quiet.is_set()

    def open(self, timeout_s: float) -> None:
        """Initialise, and exchange some bytes in both directions. Raises LinkLost.

        An initialisation cannot be interrupted. After timeout_s it is abandoned: when it returns, its thread aborts the
        communicator that it has got.
        """
        self._owner.start()
        try:
            self._opened.result(timeout_s)
        except FutureTimeout:
            self.abort()
            raise LinkLost(f"the peer did not join the NCCL communicator within {timeout_s:g} s") from None
        except BaseException:
            self.abort()
            raise

    def exchange(
        self, messages: Sequence[Message], *, is_send: bool, timeout_s: float, after: ComputeEvent | None = None
    ) -> None:
        """Send or receive messages; return when the device has done so. Raises ChunkTimeout, or LinkLost.

        After an error the messages' memory is undefined, and free for other use only after close().
        """
        exchange = _Exchange(messages, is_send, time.monotonic() + timeout_s, after)
        with self._lock:
            if self._aborting.is_set():
                raise LinkLost("the link was closed")
            self._exchanges.put(exchange)
        try:
            exchange.done.result(timeout_s)
        except FutureTimeout:
            self.abort()
            raise ChunkTimeout(f"a chunk did not move within {timeout_s:g} s") from None

    def abort(self) -> None:
        """Begin to end the communicator, without blocking. Exchanges that are under way fail with LinkLost."""
        with self._lock:
            if self._aborting.is_set():
                return
            self._aborting.set()
            self._exchanges.put(None)
            is_initialised = self._comm is not None
        if is_initialised:
            threading.Thread(target=self._abort_comm, name="nccl-abort", daemon=True).start()

    def close(self, timeout_s: float) -> bool:
        """Abort and wait; return whether the communicator is quiet. If it is not, its memory must not be used again."""
        self.abort()
        return self._quiet.wait(timeout_s)

    # -- the abort's own thread ----------------------------------------------------------------------------------

    def _abort_comm(self) -> None:
        assert self._comm is not None, "only what was initialised is aborted"
        self._device.use()
        is_owner_outside = self._calls.acquire(timeout=_ABORT_GRACE_S)
        try:
            self._comm.abort()
        finally:
            if is_owner_outside:
                self._calls.release()
        self._aborted.set()

    # -- the owner thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._device.use()
            self._stream = self._device.new_stream()
            self._initialise()
            self._warm_up(self._stream)
        except BaseException as error:
            self._opened.set_exception(_translated(error))
        else:
            self._opened.set_result(None)
        while (exchange := self._exchanges.get()) is not None:
            self._carry_out(exchange)
        self._wind_down()

    def _initialise(self) -> None:
        comm = self._library.init_rank(_NUM_RANKS, self._unique_id, self._rank)
        with self._lock:
            self._comm = comm
            is_late = self._aborting.is_set()
        if is_late:
            self._abort_comm()
            raise LinkLost("the peer joined too late")

    def _warm_up(self, stream: DeviceStream) -> None:
        """Exchange a greeting, and check it: NCCL connects at the first message, so only then is the link ready.

        The launch lock is not taken: connecting blocks until the peer does the same, and other links must go on.
        """
        content = self._greeting(self._rank)
        sent = self._device.upload(content, stream)
        received = self._device.allocate(len(content), stream)
        peer_rank = 1 - self._rank
        with self._group() as comm:
            comm.send(sent.data_ptr(), len(content), self._library.uint8, peer_rank, stream.handle)
            comm.recv(received.data_ptr(), len(content), self._library.uint8, peer_rank, stream.handle)
        self._last_queued = stream.record()
        self._await(self._last_queued)
        if stream.download(received) != self._greeting(peer_rank):
            raise LinkLost("the first bytes on the NCCL link arrived damaged: check GPU peer-to-peer and the network")

    def _greeting(self, rank: int) -> bytes:
        return hashlib.sha256(self._unique_id + bytes([rank])).digest() * _WARM_UP_REPEATS

    def _carry_out(self, exchange: _Exchange) -> None:
        try:
            self._await(self._launch(exchange))
        except BaseException as error:
            exchange.done.set_exception(_translated(error))
        else:
            exchange.done.set_result(None)

    def _launch(self, exchange: _Exchange) -> DeviceEvent:
        """Queue a whole exchange on the stream, and return its end: no part of it needs the host."""
        assert self._stream is not None, "exchanges come when it is open"
        with self._launch_turn(exchange.deadline_s):
            try:
                if exchange.after is not None:
                    self._stream.wait(exchange.after)
                for group in cut_groups(exchange.messages, STAGING_SIZE_BYTES):
                    self._launch_group(self._stream, place(group, self._take_staging), is_send=exchange.is_send)
            finally:
                # The end is recorded also after an error: a part of the exchange may be queued.
                self._last_queued = self._stream.record()
        return self._last_queued

    @contextlib.contextmanager
    def _launch_turn(self, deadline_s: float) -> Iterator[None]:
        """Hold the device's launch lock: one link at a time launches. Raises ChunkTimeout at the deadline.

        NCCL's documentation calls operations of several communicators on one device at once unsafe, unless they are
        launched in one order; and no other launch may come between a chunk's groups, copies and events. A launch takes
        microseconds: connecting, which could block, was done in the warm-up.
        """
        if not self._launch_lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise ChunkTimeout("another link's launch on this device did not end in time")
        try:
            yield
        finally:
            self._launch_lock.release()

    def _launch_group(self, stream: DeviceStream, placement: Placement, *, is_send: bool) -> None:
        uint8, peer_rank = self._library.uint8, 1 - self._rank
        if is_send and placement.staged:
            stream.copy(placement.staged, placement.pieces)
        with self._group() as comm:
            move = comm.send if is_send else comm.recv
            for address, size_bytes in placement.runs:
                move(address, size_bytes, uint8, peer_rank, stream.handle)
        if not is_send and placement.staged:
            stream.copy(placement.pieces, placement.staged)

    def _take_staging(self) -> Tensor:
        assert self._stream is not None, "exchanges come when it is open"
        if self._staging is None:
            self._staging = self._device.allocate(STAGING_SIZE_BYTES, self._stream)
        return self._staging

    @contextlib.contextmanager
    def _group(self) -> Iterator[NcclComm]:
        """Group the NCCL calls inside: they go out together at the end. The group is ended also after an error."""
        with self._calls:
            comm = self._usable_comm()
            self._library.group_start()
            try:
                yield comm
            finally:
                self._library.group_end()

    def _await(self, passed: DeviceEvent) -> None:
        """Poll until the device has passed the event. Raises what NCCL reports, or LinkLost after an abort.

        CUDA offers no wait with a timeout, and NCCL reports its errors only when asked. The thread that waits for the
        exchange has the deadline, and aborts.
        """
        pause_s = _MIN_PAUSE_S
        while True:
            is_over = passed.query()
            # The error is read after the query: if an error made the kernels end early, it is known by then.
            with self._calls:
                self._usable_comm().check_async_error()
            if is_over:
                return
            self._aborting.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _usable_comm(self) -> NcclComm:
        if self._aborting.is_set():
            raise LinkLost("the link was closed")
        assert self._comm is not None, "it was initialised"
        return self._comm

    def _wind_down(self) -> None:
        """End the thread: wait until the device is quiet, then free the memory. The deadline for it is close()'s."""
        try:
            if self._last_queued is not None:
                self._last_queued.synchronize()
        except RuntimeError:
            # CUDA itself has failed: no kernel runs any more, and the engine's next kernel raises this error.
            logger.exception("CUDA failed during a transfer over NCCL")
        self._quiet.set()
        if self._comm is not None:
            self._aborted.wait()
        self._staging = None
        if self._stream is not None:
            self._stream.close()


def _translated(error: BaseException) -> BaseException:
    """Return NCCL's and CUDA's errors as LinkLost. cupy raises KeyError for an NCCL code that it does not know."""
    if isinstance(error, KVTransferError):
        return error
    if isinstance(error, KeyError):
        return LinkLost(f"NCCL failed with code {error}")
    if isinstance(error, RuntimeError):
        return LinkLost(f"NCCL failed: {error}")
    return error
