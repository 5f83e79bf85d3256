"""Measures a device's free memory, and the peak memory of a computation."""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch

from actors.model.cache.host_memory import free_host_memory_bytes


def free_memory_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on the GPU, or on this machine within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory_bytes()


def peak_memory_bytes(device: torch.device, computation: Callable[[], object]) -> int:
    """Run a computation and return how much memory it took beyond what was in use before and what is left after.

    On the CPU this is the growth of the process' highest resident size; it may be 0 where loading took more.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        in_use = torch.cuda.memory_allocated(device)
        computation()
        peak = int(torch.cuda.max_memory_allocated(device)) - int(in_use)
        torch.cuda.empty_cache()
        return peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    computation()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
