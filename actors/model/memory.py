"""How much memory a device has left, and how much a computation takes at its peak."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of this machine within this container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(_meminfo()["MemAvailable"])
    limit = _cgroup_free_bytes()
    return available if limit is None else min(available, limit)


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


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _cgroup_free_bytes() -> int | None:
    """What a cgroup v2 limit leaves, or None where there is no limit (or no cgroup v2)."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        in_use = int((_CGROUP / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(int(limit) - in_use + int(reclaimable.get("inactive_file", 0)), 0)
