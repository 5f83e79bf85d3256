"""Measures a device's free memory, and the peak memory of a computation."""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch

from actors.model.cache.host_memory import free_host_memory_bytes
from kv_transfer.device_kind import device_module, is_accelerator


def free_memory_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on the GPU, or on this machine within the container's limit."""
    if is_accelerator(device):
        return int(device_module(device).mem_get_info(device)[0])
    return free_host_memory_bytes()


def peak_memory_bytes(device: torch.device, computation: Callable[[], object]) -> int:
    """Run a computation and return how much memory it took beyond what was in use before and what is left after.

    On the CPU this is the growth of the process' highest resident size; it may be 0 where loading took more.
    """
    if is_accelerator(device):
        device_module(device).reset_peak_memory_stats(device)
        in_use = device_module(device).memory_allocated(device)
        computation()
        peak = int(device_module(device).max_memory_allocated(device)) - int(in_use)
        device_module(device).empty_cache()
        return peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    computation()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
