"""A stand-in for NCCL: ranks that are threads of one process exchange tensors of the simulated GPU.

It has the interface of torch.distributed.ProcessGroupNCCL that the project uses, and notices what NCCL would not
forgive:

- All ranks make the same calls in the same order, on contiguous tensors of the device with one shape and one dtype.
- A result is there only for work that is queued behind wait(); its memory holds other numbers before.

As with NCCL, no call makes the host wait for the device, so none is counted. A graph cannot record a call: the project
captures none (configured_graphs.py), and this would be noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tests.simulated_gpu.tensors import SIMULATION, DeviceTensor, WaitsInGraph, poison


class DifferentCalls(RuntimeError):
    """Ranks made different calls where NCCL would hang, or would mix up numbers."""


@dataclass
class SimulatedOptions:
    """Holds the settings of a process group."""

    _timeout: timedelta = timedelta(minutes=10)


@dataclass
class Work:
    """A call that is queued. finish: writes its result"""

    finish: Callable[[], None]

    def wait(self) -> None:
        """Let what is queued from now on see the result; the host does not wait."""
        with torch.inference_mode():
            self.finish()


@dataclass
class _Call:
    """Holds what the ranks have brought to one call: by rank, what it calls and its numbers."""

    parts: dict[int, tuple[object, Tensor]] = field(default_factory=dict)
    num_taken: int = 0


class Meeting:
    """The ranks of one group."""

    def __init__(self, size: int) -> None:
        self.size, self.num_joined = size, 0
        self._calls: dict[int, _Call] = {}
        self._changed = threading.Condition()
        self._is_aborted = False

    def swap(self, rank: int, index: int, kind: object, part: Tensor, timeout_s: float) -> list[Tensor]:
        """Return the numbers of all ranks for the call with this index."""
        with self._changed:
            call = self._calls.setdefault(index, _Call())
            call.parts[rank] = (kind, part)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_aborted or len(call.parts) == self.size, timeout_s)
            if len(call.parts) < self.size:
                raise RuntimeError(f"rank {rank}: the other ranks did not make call {index}, {kind}")
            call.num_taken += 1
            if call.num_taken == self.size:
                del self._calls[index]
        if len(kinds := {kind for kind, _ in call.parts.values()}) > 1:
            raise DifferentCalls(f"ranks differ in call {index}: {sorted(map(str, kinds))}")
        return [call.parts[rank][1] for rank in range(self.size)]

    def abort(self) -> None:
        """Let the calls fail that wait for a rank. With NCCL they fail at their deadline, for which no test waits."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


_MEETINGS: Final[dict[int, Meeting]] = {}
"""The groups whose ranks have not all come, by the port of their store."""
_MEETING: Final = threading.Lock()


class SimulatedNccl:
    """One rank's end of a group."""

    Options = SimulatedOptions

    def __init__(self, store: TCPStore, rank: int, size: int, options: SimulatedOptions) -> None:
        self._rank, self._timeout_s = rank, options._timeout.total_seconds()
        self._num_calls = 0
        with _MEETING:
            self._meeting = _MEETINGS.setdefault(store.port, Meeting(size))
            self._meeting.num_joined += 1
            if self._meeting.num_joined == size:
                del _MEETINGS[store.port]

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Sum in place."""
        [tensor] = tensors
        target = _memory("allreduce", tensor)
        parts = self._swap("allreduce", target)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return _queued(target, total)

    def _allgather_base(self, output: Tensor, part: Tensor) -> Work:
        """Put the numbers of all ranks into one tensor, in their order."""
        target, own = _memory("_allgather_base", output), _memory("_allgather_base", part)
        assert target.dtype is own.dtype
        assert target.numel() == self._meeting.size * own.numel()
        return _queued(target, torch.stack(self._swap("_allgather_base", own)).view_as(target))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self._meeting.abort()

    def _swap(self, name: str, own: Tensor) -> list[Tensor]:
        if SIMULATION.is_recording:
            raise WaitsInGraph(f"{name} while a graph records, which this simulation does not know")
        self._num_calls += 1
        kind = (name, tuple(own.shape), own.dtype)
        with torch.inference_mode():
            return self._meeting.swap(self._rank, self._num_calls, kind, own.clone(), self._timeout_s)


def _memory(name: str, tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor that NCCL would take."""
    if not isinstance(tensor, DeviceTensor):
        raise RuntimeError(f"{name}: no backend for tensors of the {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: tensors must be contiguous")
    return tensor.host


def _queued(target: Tensor, result: Tensor) -> Work:
    poison(target)
    return Work(lambda: _write(target, result))


def _write(target: Tensor, result: Tensor) -> None:
    target.copy_(result)
