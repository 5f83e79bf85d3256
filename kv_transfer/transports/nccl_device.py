"""The CUDA device of the NCCL transport: the transport's own streams, events and memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kv_transfer.transports.base import ComputeEvent

_NON_BLOCKING: Final = 1
"""cudaStreamNonBlocking: not ordered with the default stream, where the engine computes."""


class DeviceEvent(ComputeEvent, Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed this point, without a timeout."""


class DeviceStream(Protocol):
    """An ordered queue of work on the device. Only download() and close() may block the calling thread."""

    @property
    def handle(self) -> int:
        """Return the cudaStream_t."""

    def wait(self, event: ComputeEvent) -> None:
        """Let all work that is queued from now on start after the event."""

    def record(self) -> DeviceEvent:
        """Return the point after everything that is queued."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue the copy of each source to its target, tensors of equal shape and dtype on this device."""

    def download(self, source: Tensor) -> bytes:
        """Wait until everything queued is done, and return the bytes of a flat uint8 tensor."""

    def close(self) -> None:
        """Destroy the stream. Nothing may be queued on it any more."""


class Device(Protocol):
    """One device. A thread calls use() before anything else touches the device from it."""

    def use(self) -> None:
        """Make this the calling thread's current device."""

    def new_stream(self) -> DeviceStream:
        """Return a stream that no other work shares."""

    def allocate(self, size_bytes: int, stream: DeviceStream) -> Tensor:
        """Return undefined memory, [size_bytes] uint8, for work that is queued on the stream from now on."""

    def upload(self, content: bytes, stream: DeviceStream) -> Tensor:
        """Copy bytes to the device: [len(content)] uint8, for work that is queued on the stream from now on."""


class CudaDevice:
    """A Device that torch and cupy drive."""

    def __init__(self, device: torch.device) -> None:
        """device: with an index, as a tensor's device has"""
        self._device = device

    def use(self) -> None:
        """Make this the thread's current device, for torch, cupy and NCCL alike: CUDA keeps it for each thread."""
        torch.cuda.set_device(self._device)

    def new_stream(self) -> CudaStream:
        """Return a CudaStream on this device."""
        return CudaStream(self._device)

    def allocate(self, size_bytes: int, stream: DeviceStream) -> Tensor:
        """Allocate by torch, in the order of the thread's current stream, for which `stream` waits; see Device."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        stream.wait(torch.cuda.current_stream(self._device).record_event())
        return memory

    def upload(self, content: bytes, stream: DeviceStream) -> Tensor:
        """Copy through the thread's current stream, for which `stream` waits; see Device."""
        memory = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        stream.wait(torch.cuda.current_stream(self._device).record_event())
        return memory


class CudaStream:
    """A stream made for one link.

    torch.cuda.Stream() would not do: it hands out 32 streams in turn, so two links could share one, and a stalled peer
    of one link would stop the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")  # cupy has no type stubs
        self.handle: int = self._runtime.streamCreateWithFlags(_NON_BLOCKING)
        self._stream = torch.cuda.ExternalStream(self.handle, device=device)  # type: ignore[no-untyped-call]  # torch's own

    def wait(self, event: ComputeEvent) -> None:
        """Let later work on this stream wait for the event, on the device only; see DeviceStream."""
        assert isinstance(event, torch.cuda.Event), "events of this device are torch's"
        self._stream.wait_event(event)

    def record(self) -> DeviceEvent:
        """Return the point after everything that is queued. A thread that waits for it sleeps and does not spin."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy all pairs with one kernel; see DeviceStream."""
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def download(self, source: Tensor) -> bytes:
        """Return a tensor's bytes; waits for this stream only. See DeviceStream."""
        with torch.cuda.stream(self._stream):
            return source.cpu().numpy().tobytes()

    def close(self) -> None:
        """Destroy the stream; see DeviceStream."""
        self._runtime.streamDestroy(self.handle)
