"""Measures this machine's free memory within the container's limit. Imports no torch: `raypd doctor` uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def free_host_memory_bytes() -> int:
    """Return how many bytes of host memory can still be allocated."""
    available = meminfo()["MemAvailable"]
    limit = _cgroup_free_bytes()
    return available if limit is None else min(available, limit)


def meminfo() -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _cgroup_free_bytes() -> int | None:
    """Return how many bytes a cgroup v2 limit leaves, or None where there is no limit (or no cgroup v2)."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        in_use = int((_CGROUP / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(int(limit) - in_use + int(reclaimable.get("inactive_file", 0)), 0)
