"""The CUDA device as the NCCL transport uses it: streams of its own, events, memory."""

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
        """Block the calling thread until the device has passed it; has no timeout."""


class DeviceStream(Protocol):
    """An ordered queue of work on the device. Nothing but close() waits for anything."""

    @property
    def handle(self) -> int:
        """The cudaStream_t."""

    def wait(self, event: ComputeEvent) -> None:
        """Work that is queued from now on starts after the event."""

    def record(self) -> DeviceEvent:
        """The point after all that is queued."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies, pair by pair, of like tensors on this device."""

    def download(self, source: Tensor) -> bytes:
        """A flat uint8 tensor's bytes, after all that is queued; blocks the calling thread until then."""

    def close(self) -> None:
        """Give the stream back. Nothing must be queued on it any more."""


class Device(Protocol):
    """One device. A thread calls use() before anything else touches the device from it."""

    def use(self) -> None:
        """Make it the calling thread's current device."""

    def new_stream(self) -> DeviceStream:
        """A stream that no other work shares."""

    def allocate(self, size_bytes: int, stream: DeviceStream) -> Tensor:
        """[size_bytes], uint8, undefined; ready for what is queued on the stream from now on."""

    def upload(self, content: bytes, stream: DeviceStream) -> Tensor:
        """[len(content)], uint8; there for what is queued on the stream from now on."""


class CudaDevice:
    """A Device of torch."""

    def __init__(self, device: torch.device) -> None:
        """device: with an index, as a tensor's is."""
        self._device = device

    def use(self) -> None:
        """Also what cupy and NCCL take: CUDA's current device belongs to the thread."""
        torch.cuda.set_device(self._device)

    def new_stream(self) -> CudaStream:
        """See CudaStream."""
        return CudaStream(self._device)

    def allocate(self, size_bytes: int, stream: DeviceStream) -> Tensor:
        """From torch's allocator, whose memory is ordered with the thread's current stream only."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        stream.wait(_mark(self._device))
        return memory

    def upload(self, content: bytes, stream: DeviceStream) -> Tensor:
        """Through the thread's current stream."""
        memory = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        stream.wait(_mark(self._device))
        return memory


class CudaStream:
    """A stream made for one link.

    torch.cuda.Stream() would not do: it hands out 32 streams by turns, so two links could share one, and a stalled peer
    of the one would stop the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")  # cupy has no type stubs
        self.handle: int = self._runtime.streamCreateWithFlags(_NON_BLOCKING)
        self._stream = torch.cuda.ExternalStream(self.handle, device=device)  # type: ignore[no-untyped-call]  # torch's own

    def wait(self, event: ComputeEvent) -> None:
        """On the device only."""
        assert isinstance(event, torch.cuda.Event), "events of this device are torch's"
        self._stream.wait_event(event)

    def record(self) -> DeviceEvent:
        """blocking: whoever synchronizes sleeps instead of spinning."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """One kernel for all of them."""
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def download(self, source: Tensor) -> bytes:
        """Waits for this stream only."""
        with torch.cuda.stream(self._stream):
            return source.cpu().numpy().tobytes()

    def close(self) -> None:
        """Destroy it."""
        self._runtime.streamDestroy(self.handle)


def mark_compute(device: torch.device) -> ComputeEvent | None:
    """Record how far the calling thread's stream has been filled; None on the CPU, which computes in order."""
    if device.type != "cuda":
        return None
    return _mark(device)


def _mark(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
