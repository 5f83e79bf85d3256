"""Makes the simulated GPU known to torch, and to the project as the accelerator of this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch import library as operator_library
from torch.utils import backend_registration
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from actors.model import loader
from tests.simulated_gpu.block_order import ORDER
from tests.simulated_gpu.collectives import SimulatedNccl
from tests.simulated_gpu.graph import Pool, SimulatedGraph, recording
from tests.simulated_gpu.tensors import DEVICE_NAME, SIMULATION, DeviceTensor, is_pinned, pin, run

NUM_PROCESSORS: Final = 4
FREE_BYTES: Final = 1 << 33


class SimulatedEvent:
    """A point in what is queued."""

    def __init__(self, *, blocking: bool = False) -> None:
        self._point = -1
        self.operators = -1
        """How many operators of the main stream are before the point."""

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._point = SIMULATION.num_queued
        self.operators = ORDER.point if SIMULATION.thread.side_stream is None else SIMULATION.thread.waited

    def query(self) -> bool:
        return SIMULATION.num_done >= self._point

    def synchronize(self) -> None:
        """Wait, which counts: an event is waited for where the host needs numbers."""
        SIMULATION.wait("event")
        SIMULATION.finish(self._point)


class SimulatedStream:
    """Does in order what is queued on any stream, but a side stream has to wait for another one's event first."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_event(self, event: SimulatedEvent) -> None:
        """Work on the device waits, and not the host."""
        assert event._point >= 0, "the event is of no stream"
        SIMULATION.thread.waited = max(SIMULATION.thread.waited, event.operators)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        SIMULATION.wait("stream")


class SimulatedModule(backend_registration._DummyBackendModule):
    """The module torch.simgpu, with the names of torch.cuda that the project uses."""

    Stream = SimulatedStream
    Event = SimulatedEvent
    CUDAGraph = SimulatedGraph

    def __init__(self) -> None:
        self._main = SimulatedStream()

    def set_device(self, device: object) -> None:
        pass

    def current_stream(self, device: object = None) -> SimulatedStream:
        return SIMULATION.thread.side_stream or self._main

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        assert SIMULATION.thread.side_stream is None, "the project nests no streams"
        SIMULATION.thread.side_stream, SIMULATION.thread.waited = stream, -1
        try:
            yield
        finally:
            SIMULATION.thread.side_stream = None

    def graph(self, graph: SimulatedGraph, *, pool: Pool | None = None, **kwargs: Any) -> Any:
        return recording(graph, pool)

    def graph_pool_handle(self) -> Pool:
        return Pool()

    def synchronize(self, device: object = None) -> None:
        SIMULATION.wait("device")

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return FREE_BYTES, FREE_BYTES

    def memory_allocated(self, device: object = None) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return (9, 0)

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=NUM_PROCESSORS, total_memory=FREE_BYTES, name="simulated")

    def get_device_name(self, device: object = None) -> str:
        return "simulated"


@functools.cache
def install() -> torch.device:
    """Bring the device into this process for good, and return it."""
    _setup_privateuseone_for_python_backend(DEVICE_NAME, SimulatedModule())
    # Parameters are replaced and not overwritten, since an ordinary tensor cannot become one of the device.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
    _LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):
        _LIBRARY.impl(name, _arange, "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: pin(tensor))  # noqa: B010  # torch types its own
    setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: is_pinned(tensor))  # noqa: B010
    device = torch.device(DEVICE_NAME, 0)
    setattr(torch, "empty", functools.partial(_empty_pinned, torch.empty))  # noqa: B010
    setattr(loader, "find_accelerator", lambda: device)  # noqa: B010
    setattr(torch.distributed, "ProcessGroupNCCL", SimulatedNccl)  # noqa: B010  # a CPU build of torch has none
    return device


_LIBRARY: Final[Any] = vars(operator_library)["Library"]("aten", "IMPL")  # torch has no types for it


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    return _fresh(torch.empty(size, dtype=dtype))


def _empty_pinned(empty: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """Allocate, in memory that counts as pinned if that is asked for: a CPU build of torch has none."""
    made: Tensor = empty(*args, **kwargs)
    return pin(made) if pin_memory else made


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return _fresh(torch.empty_strided(size, stride, dtype=dtype))


def _arange(*numbers: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
    # torch's own way makes an empty tensor and enlarges it, which a tensor of the device cannot see.
    made = torch.arange(*numbers, dtype=dtype)
    if SIMULATION.is_recording:
        assert SIMULATION.recorder is not None
        SIMULATION.recorder.record(torch.arange, numbers, {"dtype": dtype}, made)
    return DeviceTensor(made)


def _fresh(inner: Tensor) -> Tensor:
    if SIMULATION.is_recording:
        assert SIMULATION.recorder is not None
        SIMULATION.recorder.allocate(inner)
    return DeviceTensor(inner)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    copied: Tensor = run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
    return copied
