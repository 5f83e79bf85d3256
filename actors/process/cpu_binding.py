"""The cores on which an engine's threads compute, reserved so that no other engine of the host uses them.

An engine holds a core by binding an abstract Unix socket with the core's number. The kernel gives a name to one process
at a time, and frees it when that process ends, however it ends; no file is left. An engine gets all the cores that it
wants, or none: half of its threads on cores of their own would wait for the others.

Only the thread that steps the engine is bound, and with it the threads that torch starts from it. Those of gRPC, of KV
transfers and of the event loop run anywhere, so that heartbeats are answered while a step computes.

Engines are not bound where this could put two of them on one core, or keep an engine from cores that are free:
see find_obstacle().
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_NAME: Final = "raypd-core"
_NUM_TRIES: Final = 10
_TRY_INTERVAL_S: Final = 0.1
_INITIAL_PID_NAMESPACE: Final = 4026531836
"""The kernel's constant PROC_PID_INIT_INO: the inode of the PID namespace that no container made."""


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """The threads of an engine that compute.

    count:       torch's threads
    cpu_binding: the setting, "auto" or "none"
    num_ranks:   tensor-parallel ranks of the engine
    """

    count: int
    cpu_binding: str
    num_ranks: int = 1
    is_on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class CpuShare:
    """The CPUs that Ray has reserved for an engine.

    num_cpus:      CPUs of the engine (num_cpus of its role)
    num_node_cpus: CPUs of the node that Ray gives away to all engines together
    """

    num_cpus: float
    num_node_cpus: float


@dataclass(frozen=True, slots=True)
class HostCpus:
    """The logical CPUs that this process may use.

    cores:   their numbers, in increasing order
    locations:  the NUMA node and the physical core of each, where the system tells
    sharing: why other processes may compute on the same CPUs without our knowing; None if they cannot
    """

    cores: tuple[int, ...]
    locations: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    sharing: str | None = None


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The decision for one engine.

    num_threads: torch's threads
    cores:       numbers of the logical CPUs on which they compute; empty if they compute on any
    reason:      why they are not bound; "" if they are
    """

    num_threads: int
    cores: tuple[int, ...] = ()
    reason: str = ""
    held: tuple[socket.socket, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        """Describe the decision, for the log and `raypd status`."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        if not self.cores:
            return f"{threads} on any core: {self.reason}"
        return f"{threads} on core{'s' * (len(self.cores) > 1)} {', '.join(map(str, self.cores))}"

    def bind_this_thread(self) -> None:
        """Bind the calling thread, and with it the threads that it starts, to the cores, if there are any."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def release(self) -> None:
        """Free the cores for other engines. Called after the engine's last step."""
        for held in self.held:
            held.close()


def run_on_any_core() -> None:
    """Undo bind_this_thread() for a thread that an engine's thread has started, and that is to compute beside it."""
    os.sched_setaffinity(0, set().union(*_masks_of_threads()))


def _masks_of_threads() -> Iterator[set[int]]:
    for thread in Path("/proc/self/task").iterdir():
        try:
            yield os.sched_getaffinity(int(thread.name))
        except ProcessLookupError:  # It has ended meanwhile.
            continue


def decide_binding(threads: ComputeThreads, share: CpuShare | None, host: HostCpus, name: str = _NAME) -> CpuBinding:
    """Hold cores for an engine where this is possible. Blocks for a second at most, while others hold too many.

    share: None for an engine outside of Ray
    name: the beginning of the sockets' names, for tests
    """
    if (obstacle := find_obstacle(threads, share, host)) is not None:
        return CpuBinding(threads.count, reason=obstacle)
    assert share is not None
    wanted, pause = int(share.num_cpus), threading.Event()
    for number in range(_NUM_TRIES):
        # An engine that this one replaces may still be ending.
        if number:
            pause.wait(_TRY_INTERVAL_S)
        if (held := _hold_cores(wanted, host, name)) is not None:
            return CpuBinding(threads.count, tuple(sorted(held)), held=tuple(held.values()))
    return CpuBinding(threads.count, reason=f"other engines of this host hold too many of its {len(host.cores)} cores")


def find_obstacle(threads: ComputeThreads, share: CpuShare | None, host: HostCpus) -> str | None:
    """Return why an engine is not to be bound, or None."""
    if threads.cpu_binding == "none":
        return "parallel.cpu_binding is none"
    if share is None:
        return "the engine runs outside of Ray"
    if threads.is_on_gpu:
        return "the model is on a GPU"
    if threads.num_ranks > 1:
        return "tensor-parallel ranks are not bound"
    if share.num_cpus < 1 or share.num_cpus != int(share.num_cpus):
        return f"num_cpus is {share.num_cpus:g}, which are no whole cores"
    if threads.count > share.num_cpus:
        return f"parallel.num_threads ({threads.count}) is more than num_cpus ({share.num_cpus:g})"
    if share.num_node_cpus > len(host.cores):
        return f"Ray gives away {share.num_node_cpus:g} CPUs of this node, and its processes may use {len(host.cores)}"
    return host.sharing


def _hold_cores(wanted: int, host: HostCpus, name: str) -> dict[int, socket.socket] | None:
    """Hold cores of one NUMA node if one has enough, else of several; None if there are not enough."""
    for group in [*_by_node(host), _in_order(host.cores, host)]:
        held: dict[int, socket.socket] = {}
        for core in group:
            if len(held) < wanted and (lock := _hold(f"{name}-{core}")) is not None:
                held[core] = lock
        if len(held) == wanted:
            return held
        for lock in held.values():
            lock.close()
    return None


def _hold(name: str) -> socket.socket | None:
    """Bind an abstract name; None if another process has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock


def _by_node(host: HostCpus) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for core in host.cores:
        nodes.setdefault(host.locations.get(core, (0, ""))[0], []).append(core)
    return [_in_order(cores, host) for _, cores in sorted(nodes.items())]


def _in_order(cores: Sequence[int], host: HostCpus) -> list[int]:
    """Return one logical CPU of each physical core first, then their siblings."""
    ranks: dict[int, int] = {}
    seen: dict[tuple[int, str], int] = {}
    for core in sorted(cores):
        location = host.locations.get(core, (0, f"cpu{core}"))
        ranks[core] = seen[location] = seen.get(location, -1) + 1
    return sorted(cores, key=lambda core: (ranks[core], core))


def read_host_cpus(system: Path = Path("/sys"), process: Path = Path("/proc/self")) -> HostCpus:
    """Read what this process may use. system, process: where the kernel tells it, for tests"""
    cores = tuple(sorted(os.sched_getaffinity(os.getpid())))
    devices = system / "devices/system/cpu"
    locations = {core: location for core in cores if (location := _location(devices / f"cpu{core}")) is not None}
    return HostCpus(cores, locations, _find_sharing(cores, system, process))


def _location(device: Path) -> tuple[int, str] | None:
    package, core = _read(device / "topology/physical_package_id"), _read(device / "topology/core_id")
    if package is None or core is None:
        return None
    node = next((int(path.name[4:]) for path in device.glob("node[0-9]*")), 0)
    return node, f"{package}/{core}"


def _find_sharing(cores: Sequence[int], system: Path, process: Path) -> str | None:
    quota = _cpu_quota(system / "fs/cgroup", process)
    if quota is not None and quota < len(cores):
        return f"a quota of {quota:g} CPUs (cpu.max) shares out {len(cores)} cores"
    try:
        is_container = (process / "ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE
    except OSError:
        is_container = True
    if is_container and len(cores) == _num_online(system):
        return "a container without a CPU set of its own shares its cores with the rest of the host"
    return None


def _cpu_quota(root: Path, process: Path) -> float | None:
    """Return the smallest quota of the control groups that this process is in, in CPUs; None without one."""
    quotas = []
    own = next((line[3:] for line in (_read(process / "cgroup") or "").splitlines() if line.startswith("0::")), "/")
    group = root / own.lstrip("/")
    for path in (group, *group.parents):
        if not path.is_relative_to(root):
            break
        match (_read(path / "cpu.max") or "").split():
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
    quota_us, period_us = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if quota_us is not None and period_us is not None and int(quota_us) > 0:
        quotas.append(int(quota_us) / int(period_us))
    return min(quotas, default=None)


def _num_online(system: Path) -> int:
    ranges = _read(system / "devices/system/cpu/online") or ""
    ends = [part.partition("-") for part in ranges.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
