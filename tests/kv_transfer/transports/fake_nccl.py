"""NCCL and a device for two ends in one process, with the habits of the real ones that the transport must live with.

Streams run on threads of their own. Initialisation, a first group's end and an abort block the host; k-th sends meet
k-th receives, whose sizes nobody compares; a kernel spins until it is matched or its own communicator is aborted; an
abort leaves garbage in what was to be received. What NCCL leaves undefined is written down as a violation instead.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.nccl_device import DeviceStream
from kv_transfer.transports.nccl_library import NcclLibrary

VERSION = 22809
UINT8 = 1
GARBAGE = 0xAB
_TIMEOUT_S = 90.0


class FakeNcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL status {status}")
        self.status = status


class FakeEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(_TIMEOUT_S)

    def set(self) -> None:
        self._passed.set()


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def enqueue(self, work: Callable[[], None]) -> None:
        assert not self.is_closed, "work on a closed stream"
        self._work.put(work)

    def wait(self, event: ComputeEvent) -> None:
        assert isinstance(event, FakeEvent)
        self.enqueue(event.synchronize)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.enqueue(event.set)
        return event

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.enqueue(lambda: torch._foreach_copy_(list(targets), list(sources)))

    def download(self, source: Tensor) -> bytes:
        self.record().synchronize()
        return source.numpy().tobytes()

    def close(self) -> None:
        self._work.put(None)
        self.is_closed = True

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class FakeDevice:
    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self._local = threading.local()
        self._handles = itertools.count(1)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread has called use()."""
        return getattr(self._local, "is_current", False)

    def use(self) -> None:
        self._local.is_current = True

    def new_stream(self) -> FakeStream:
        stream = FakeStream(next(self._handles))
        self.streams[stream.handle] = stream
        return stream

    def allocate(self, size_bytes: int, stream: DeviceStream) -> Tensor:
        del stream
        return torch.full((size_bytes,), GARBAGE, dtype=torch.uint8)

    def upload(self, content: bytes, stream: DeviceStream) -> Tensor:
        del stream
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class FakeNetwork:
    """tells_peer: whether NCCL notices that the other end is gone, as over sockets; over NVLink it does not."""

    def __init__(self) -> None:
        self.tells_peer = True
        self.damage: Callable[[int], object] | None = None
        self.violations: list[str] = []
        self.num_delivered = 0
        self.is_closed = False
        self.changed = threading.Condition()
        self._pairs: dict[bytes, _Pair] = {}
        self._numbers = itertools.count()

    def make_unique_id(self) -> bytes:
        with self.changed:
            unique_id = next(self._numbers).to_bytes(128, "big")
            self._pairs[unique_id] = _Pair()
        return unique_id

    def pair(self, unique_id: bytes) -> _Pair:
        with self.changed:
            return self._pairs[unique_id]

    def wait(self, is_done: Callable[[], bool]) -> None:
        """With `changed` held."""
        assert self.changed.wait_for(lambda: self.is_closed or is_done(), _TIMEOUT_S), "a fake call hangs for good"

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for what happens on threads that nobody waits for."""
        with self.changed:
            self.wait(is_done)

    def close(self) -> None:
        """Let go of everything that hangs."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


@dataclass(slots=True, eq=False)
class _Operation:
    comm: FakeComm
    is_send: bool
    address: int
    size_bytes: int
    stream: int
    is_done: bool = False


@dataclass(slots=True)
class _Pair:
    joined: set[int] = field(default_factory=set)
    launched: set[int] = field(default_factory=set)
    errors: dict[int, Exception] = field(default_factory=dict)
    sends: tuple[deque[_Operation], deque[_Operation]] = field(default_factory=lambda: (deque(), deque()))
    receives: tuple[deque[_Operation], deque[_Operation]] = field(default_factory=lambda: (deque(), deque()))
    """Both by the sender's rank."""


class FakeEnd:
    """One process: its device and its NCCL. While an event may_… is not set, the calls that it is for hang."""

    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.device = FakeDevice()
        self.comms: list[FakeComm] = []
        self.num_groups = 0
        self.sizes: list[int] = []
        self.num_launching = 0
        self.num_open_groups = 0
        self.on_launch: Callable[[], object] = lambda: None
        self.may_abort = _set_event()
        self.may_run_kernels = _set_event()
        self.may_launch = _set_event()
        self.may_init = _set_event()
        self._local = threading.local()
        self.nccl = NcclLibrary(
            version=VERSION,
            uint8=UINT8,
            make_unique_id=network.make_unique_id,
            init_rank=self._init_rank,
            group_start=self._group_start,
            group_end=self._group_end,
        )

    def say_violation(self, what: str) -> None:
        self.network.violations.append(what)

    def wait_for(self, event: threading.Event, is_woken: Callable[[], bool]) -> None:
        network = self.network
        with network.changed:
            network.wait(lambda: event.is_set() or is_woken())

    def allow(self, event: threading.Event) -> None:
        with self.network.changed:
            event.set()
            self.network.changed.notify_all()

    def _init_rank(self, num_ranks: int, unique_id: bytes, rank: int) -> FakeComm:
        assert num_ranks == 2
        assert len(unique_id) == 128
        comm = FakeComm(self, self.network.pair(unique_id), rank)
        self.comms.append(comm)
        return comm

    def _group_start(self) -> None:
        if self.group is not None:
            self.say_violation("a group within a group")
        self._local.group = []
        self.num_open_groups += 1

    def _group_end(self) -> None:
        group, self._local.group = self.group, None
        self.num_open_groups -= 1
        if group:
            group[0].comm.launch(group)

    @property
    def group(self) -> list[_Operation] | None:
        group: list[_Operation] | None = getattr(self._local, "group", None)
        return group


class FakeComm:
    def __init__(self, end: FakeEnd, pair: _Pair, rank: int) -> None:
        self.rank = rank
        self.is_aborted = False
        self._end = end
        self._pair = pair
        self._owner = threading.get_ident()
        self._is_connected = False
        self._check_device()
        network = end.network
        with network.changed:
            pair.joined.add(rank)
            network.changed.notify_all()
            network.wait(lambda: len(pair.joined) == 2 and end.may_init.is_set())
            if len(pair.joined) < 2:
                self.is_aborted = True
                raise FakeNcclError(2)

    def __del__(self) -> None:
        if not self.is_aborted and not self._end.network.is_closed:
            self._end.say_violation("a communicator was dropped without an abort")

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        self._queue(True, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        self._queue(False, recvbuf, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        self._check_call()
        with self._end.network.changed:
            error = self._pair.errors.get(self.rank)
        if error is not None:
            raise error

    def fail(self, error: Exception) -> None:
        """Let this end have an asynchronous error."""
        with self._end.network.changed:
            self._pair.errors[self.rank] = error

    def abort(self) -> None:
        self._check_device()
        self._end.wait_for(self._end.may_abort, lambda: False)
        network = self._end.network
        with network.changed:
            self.is_aborted = True
            if network.tells_peer:
                self._pair.errors.setdefault(1 - self.rank, FakeNcclError(6))
            network.changed.notify_all()

    def launch(self, group: list[_Operation]) -> None:
        """Block until the peer has connected, then put one kernel on the stream."""
        self._check_call()
        end, network, pair = self._end, self._end.network, self._pair
        end.num_groups += 1
        end.sizes += [operation.size_bytes for operation in group]
        if self._is_connected:
            self._check_turn()
        end.wait_for(end.may_launch, lambda: self.is_aborted)
        with network.changed:
            pair.launched.add(self.rank)
            network.changed.notify_all()
            network.wait(lambda: len(pair.launched) == 2 or self.is_aborted)
        if self.is_aborted or len(pair.launched) < 2:
            raise FakeNcclError(3)
        self._is_connected = True
        end.device.streams[group[0].stream].enqueue(lambda: self._kernel(group))

    def _check_turn(self) -> None:
        end = self._end
        end.num_launching += 1
        end.on_launch()
        if end.num_launching > 1:
            end.say_violation("two launches at once on one device")
        end.num_launching -= 1

    def _queue(self, is_send: bool, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._check_call()
        assert datatype == UINT8
        assert peer == 1 - self.rank
        group = self._end.group
        if group is None:
            self._end.say_violation("a message outside of a group")
            return
        group.append(_Operation(self, is_send, address, count, stream))

    def _kernel(self, group: list[_Operation]) -> None:
        network = self._end.network
        with network.changed:
            for operation in group:
                self._post(operation)
            network.changed.notify_all()
            network.wait(lambda: all(operation.is_done for operation in group) or self._may_leave())
            for operation in group:
                if not operation.is_done:
                    self._withdraw(operation)

    def _may_leave(self) -> bool:
        return self.is_aborted and self._end.may_run_kernels.is_set()

    def _post(self, operation: _Operation) -> None:
        sender = self.rank if operation.is_send else 1 - self.rank
        sends, receives = self._pair.sends[sender], self._pair.receives[sender]
        (sends if operation.is_send else receives).append(operation)
        while sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            if sent.size_bytes != received.size_bytes:
                self._end.say_violation(f"{sent.size_bytes} bytes were sent, {received.size_bytes} received")
                continue
            ctypes.memmove(received.address, sent.address, sent.size_bytes)
            if self._end.network.damage is not None:
                self._end.network.damage(received.address)
            sent.is_done = received.is_done = True
            self._end.network.num_delivered += 1

    def _withdraw(self, operation: _Operation) -> None:
        for queued in (*self._pair.sends, *self._pair.receives):
            if operation in queued:
                queued.remove(operation)
        if not operation.is_send:
            ctypes.memset(operation.address, GARBAGE, operation.size_bytes)

    def _check_call(self) -> None:
        self._check_device()
        if self.is_aborted:
            self._end.say_violation("a call on an aborted communicator")
        if threading.get_ident() != self._owner:
            self._end.say_violation("a call from a second thread")

    def _check_device(self) -> None:
        if not self._end.device.is_current:
            self._end.say_violation("a call from a thread without the device")


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
