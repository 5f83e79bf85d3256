"""Tells accelerators from the CPU. All code that branches by a tensor's device asks here.

An accelerator has streams: work is queued on it, and the host does not wait for it. CUDA devices are accelerators, and
so is the simulated one on which the tests walk the same branches without a GPU. torch has a module for each kind of
accelerator, such as torch.cuda, with classes and functions of the same names; device_module() returns it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch import Tensor


class StreamEvent(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Return whether the device has passed the point."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed the point, without a timeout."""

    def record(self, stream: StreamQueue) -> None:
        """Move the point behind everything that is queued on the stream."""


class StreamQueue(Protocol):
    """A queue of work on an accelerator, in order."""

    def wait_event(self, event: StreamEvent) -> None:
        """Let all work that is queued from now on start after the event."""

    def record_event(self) -> StreamEvent:
        """Return the point after everything that is queued."""

    def synchronize(self) -> None:
        """Block the calling thread until everything that is queued is done."""


class RecordedGraph(Protocol):
    """Work that was launched while the graph was recorded."""

    def replay(self) -> None:
        """Launch all of it again."""


class DeviceProperties(Protocol):
    """Facts of a device's hardware."""

    @property
    def multi_processor_count(self) -> int:
        """How many multiprocessors it has."""


class DeviceModule(Protocol):
    """The functions of torch.cuda, and of other accelerators' modules, that the project uses."""

    def device_count(self) -> int:
        """Return how many such devices this process can use."""

    def set_device(self, device: torch.device | int) -> None:
        """Make a device the calling thread's current one."""

    def current_stream(self, device: torch.device) -> StreamQueue:
        """Return the stream on which the calling thread's work is queued."""

    def stream(self, stream: StreamQueue) -> AbstractContextManager[object]:
        """Return a context in which the calling thread's work is queued on another stream."""

    def Stream(self, device: torch.device) -> StreamQueue:  # noqa: N802  # torch's name of a class
        """Make a stream."""

    def Event(self, *, blocking: bool = False) -> StreamEvent:  # noqa: N802  # torch's name of a class
        """Make an event. blocking: a thread that waits for it sleeps and does not spin"""

    def CUDAGraph(self) -> RecordedGraph:  # noqa: N802  # torch's name of a class
        """Make an empty graph."""

    def graph(
        self, graph: RecordedGraph, *, pool: object, stream: StreamQueue, capture_error_mode: str
    ) -> AbstractContextManager[object]:
        """Return a context in which what the calling thread launches is recorded and not done."""

    def graph_pool_handle(self) -> object:
        """Return a new pool of memory, which several graphs can share."""

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until everything that is queued on the device is done."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return the device's free and its whole memory, in bytes."""

    def memory_allocated(self, device: torch.device) -> int:
        """Return how many bytes tensors take."""

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return how many bytes tensors took at most since the last reset."""

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Forget the peak of max_memory_allocated()."""

    def empty_cache(self) -> None:
        """Give memory that no tensor takes back to the device."""

    def get_device_properties(self, device: torch.device) -> DeviceProperties:
        """Return facts of the hardware."""

    def get_device_name(self, device: torch.device) -> str:
        """Return the name of the hardware."""

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        """Return the compute capability, such as (9, 0)."""


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device is queued, and the host does not wait for it."""
    return device.type != "cpu"


def find_accelerator() -> torch.device | None:
    """Return the accelerator that torch finds on this machine, without an index; None if there is none."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def device_module(device: torch.device) -> DeviceModule:
    """Return torch's module for an accelerator's kind."""
    return cast(DeviceModule, torch.get_device_module(device))


def mark_stream(device: torch.device) -> StreamEvent | None:
    """Return the point after all work on the calling thread's stream; None on a CPU, which computes in order."""
    return device_module(device).current_stream(device).record_event() if is_accelerator(device) else None


def mark_for_waiting(device: torch.device) -> StreamEvent | None:
    """Return the same point as mark_stream(), for a thread of the host that sleeps until the device has passed it.

    A thread that spins until then would take a core from those that serve.
    """
    if not is_accelerator(device):
        return None
    module = device_module(device)
    event = module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event


def pin_for(device: torch.device, tensor: Tensor) -> Tensor:
    """Return host memory from which a copy to the device can be queued: pinned for an accelerator.

    A copy from other host memory makes the host wait for everything that is queued on the device.
    tensor: in host memory; returned as it is for a CPU, and for torch's device meta, to which nothing is copied
    """
    return tensor.pin_memory() if is_accelerator(device) and device.type != "meta" else tensor
