"""The only code that records CUDA graphs: what torch offers for it, behind a small interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kv_transfer.device_kind import device_module


class Graph(Protocol):
    """Work that a function has launched, with the memory that its operators had when it was recorded."""

    def replay(self) -> None:
        """Launch all of it again, behind what is queued; the host does not wait."""


class GraphRecorder(Protocol):
    """Records graphs that share one pool of memory, so one of them may overwrite what another has computed."""

    def record(self, function: Callable[[], object]) -> Graph:
        """Record a function that has run before, so that it compiles and allocates nothing for the first time.

        Raises RuntimeError if the function waits for the device.
        """

    def free_memory_bytes(self) -> int:
        """Return how much of the device's memory is free, after all that is queued is done."""


class DeviceGraphRecorder:
    """Records graphs of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = device_module(device)
        self._pool = self._module.graph_pool_handle()
        self._stream = self._module.Stream(device)

    def record(self, function: Callable[[], object]) -> Graph:
        """See GraphRecorder. Other threads may use the device meanwhile."""
        self._module.synchronize(self._device)
        graph = self._module.CUDAGraph()
        with self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph

    def free_memory_bytes(self) -> int:
        """See GraphRecorder."""
        self._module.synchronize(self._device)
        return self._module.mem_get_info(self._device)[0]
