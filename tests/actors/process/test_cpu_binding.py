"""Engines of a host hold cores each for itself, and are bound only where this takes no core from anything else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from actors.process import cpu_binding
from actors.process.cpu_binding import (
    ComputeThreads,
    CpuBinding,
    CpuShare,
    HostCpus,
    decide_binding,
    find_obstacle,
    read_host_cpus,
    run_on_any_core,
)

_TIMEOUT_S = 30.0
_AUTO = ComputeThreads(2, "auto")
_HOST = HostCpus((0, 1, 2, 3))
_HOLDER = """
import sys
from actors.process.cpu_binding import ComputeThreads, CpuShare, HostCpus, decide_binding
binding = decide_binding(ComputeThreads(2, "auto"), CpuShare(2, 4), HostCpus((0, 1, 2, 3)), sys.argv[1])
print(*binding.cores, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    """The beginning of the sockets' names, so that tests do not meet each other or engines."""
    return f"test-{uuid4().hex}"


def _decide(name: str, num_cpus: int = 2, host: HostCpus = _HOST) -> CpuBinding:
    share = CpuShare(num_cpus, len(host.cores))
    return decide_binding(ComputeThreads(min(2, num_cpus), "auto"), share, host, name)


@contextmanager
def _holder(name: str) -> Iterator[tuple[subprocess.Popen[str], tuple[int, ...]]]:
    """A process that holds two of four cores until it ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, tuple(int(core) for core in process.stdout.readline().split())
        finally:
            process.kill()


def test_engines_of_a_host_get_cores_of_their_own_until_none_are_left(name: str) -> None:
    bindings = [_decide(name) for _ in range(3)]
    assert [binding.cores for binding in bindings] == [(0, 1), (2, 3), ()]
    assert str(bindings[0]) == "2 threads on cores 0, 1"
    assert str(bindings[2]) == "2 threads on any core: other engines of this host hold too many of its 4 cores"
    for binding in bindings:
        binding.release()


def test_an_engine_that_gets_too_few_cores_holds_none(name: str) -> None:
    first, too_many = _decide(name), _decide(name, num_cpus=3)
    assert (first.cores, too_many.cores) == ((0, 1), ())
    last = _decide(name)
    assert last.cores == (2, 3)
    for binding in (first, last):
        binding.release()


def test_cores_are_free_again_when_an_engine_ends_or_is_killed(name: str) -> None:
    with _holder(name) as (process, cores):
        assert cores == (0, 1)
        ours = _decide(name)
        assert ours.cores == (2, 3)
        ours.release()
        process.send_signal(signal.SIGKILL)
        process.wait(_TIMEOUT_S)
        successors = [_decide(name), _decide(name)]
        assert [one.cores for one in successors] == [(0, 1), (2, 3)]
        for one in successors:
            one.release()


def test_two_processes_that_start_at_the_same_time_never_have_a_core_together(name: str) -> None:
    with _holder(name) as (_, first), _holder(name) as (_, second):
        assert sorted(first + second) == [0, 1, 2, 3]


def test_an_engine_waits_a_moment_for_the_cores_of_one_that_is_ending(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_binding, "_NUM_TRIES", 600)
    predecessor = _decide(name, num_cpus=4)
    release = threading.Timer(0.15, predecessor.release)
    release.start()
    successor = _decide(name, num_cpus=4)
    release.join(_TIMEOUT_S)
    assert successor.cores == (0, 1, 2, 3)
    successor.release()


def test_an_engine_gets_physical_cores_of_one_numa_node_where_it_can(name: str) -> None:
    # As Linux numbers two nodes of two cores with two hyper-threads each: the siblings come last.
    locations = {cpu: (cpu % 4 // 2, f"{cpu % 4 // 2}/{cpu % 2}") for cpu in range(8)}
    host = HostCpus(tuple(range(8)), locations)
    bindings = [_decide(name, num_cpus, host) for num_cpus in (1, 2, 2, 3)]
    assert [binding.cores for binding in bindings] == [(0,), (1, 4), (2, 3), (5, 6, 7)]
    for binding in bindings:
        binding.release()


@pytest.mark.parametrize(
    ("threads", "share", "host", "reason"),
    [
        (ComputeThreads(2, "none"), CpuShare(2, 4), _HOST, "parallel.cpu_binding is none"),
        (_AUTO, None, _HOST, "the engine runs outside of Ray"),
        (ComputeThreads(2, "auto", is_on_gpu=True), CpuShare(2, 4), _HOST, "the model is on a GPU"),
        (ComputeThreads(2, "auto", num_ranks=2), CpuShare(2, 4), _HOST, "tensor-parallel ranks are not bound"),
        (_AUTO, CpuShare(0.5, 4), _HOST, "num_cpus is 0.5, which are no whole cores"),
        (_AUTO, CpuShare(1, 4), _HOST, "parallel.num_threads (2) is more than num_cpus (1)"),
        (_AUTO, CpuShare(2, 4), HostCpus((0, 1)), "Ray gives away 4 CPUs of this node, and its processes may use 2"),
        (_AUTO, CpuShare(2, 4), HostCpus((0, 1, 2, 3), sharing="a quota"), "a quota"),
        (_AUTO, CpuShare(4, 4), _HOST, None),
    ],
)
def test_an_engine_is_not_bound_where_its_cores_would_not_be_its_own(
    threads: ComputeThreads, share: CpuShare | None, host: HostCpus, reason: str | None, name: str
) -> None:
    assert find_obstacle(threads, share, host) == reason
    binding = decide_binding(threads, share, host, name)
    assert bool(binding.cores) == (reason is None)
    assert str(binding) == ("2 threads on cores 0, 1, 2, 3" if reason is None else f"2 threads on any core: {reason}")
    binding.release()


def test_only_the_calling_thread_and_those_that_it_starts_are_bound() -> None:
    everywhere = os.sched_getaffinity(0)
    binding = CpuBinding(1, (min(everywhere),))

    def masks() -> list[set[int]]:
        binding.bind_this_thread()
        found = [os.sched_getaffinity(0)]
        for leave in (lambda: None, run_on_any_core):
            with ThreadPoolExecutor(1, initializer=leave) as thread:
                found.append(thread.submit(os.sched_getaffinity, 0).result(_TIMEOUT_S))
        return found

    with ThreadPoolExecutor(1) as engine:
        assert engine.submit(masks).result(_TIMEOUT_S) == [{min(everywhere)}, {min(everywhere)}, everywhere]
    assert os.sched_getaffinity(0) == everywhere


def test_a_binding_without_cores_binds_nothing() -> None:
    before = os.sched_getaffinity(0)
    CpuBinding(1, reason="some").bind_this_thread()
    assert os.sched_getaffinity(0) == before


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four CPUs, of which a process may use two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    _write(tmp_path / "devices/system/cpu/online", "0-1,3,5\n")
    for cpu in (1, 3):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        _write(topology / "physical_package_id", "0\n")
        _write(topology / "core_id", f"{cpu // 2}\n")
        (tmp_path / f"devices/system/cpu/cpu{cpu}/node{cpu // 3}").mkdir()
    return tmp_path


def test_the_cores_are_those_of_the_process_with_their_places(system: Path) -> None:
    found = read_host_cpus(system)
    assert (found.cores, found.locations) == ((1, 3), {1: (0, "0/0"), 3: (1, "0/1")})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"fs/cgroup/cpu.max": "max 100000"}, None),
        ({"fs/cgroup/cpu.max": "200000 100000"}, None),
        ({"fs/cgroup/cpu.max": "150000 100000"}, "a quota of 1.5 CPUs (cpu.max) shares out 2 cores"),
        ({"fs/cgroup/a/cpu.max": "100000 100000"}, "a quota of 1 CPUs (cpu.max) shares out 2 cores"),
        (
            {"fs/cgroup/cpu/cpu.cfs_quota_us": "50000", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            "a quota of 0.5 CPUs (cpu.max) shares out 2 cores",
        ),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_a_quota_of_a_control_group_shares_out_cores(files: dict[str, str], reason: str | None, system: Path) -> None:
    for name, text in files.items():
        _write(system / name, text)
    _write(system / "self/cgroup", "1:name=systemd:/\n0::/a/b\n")
    _write(system / "self/ns/pid", "")
    assert read_host_cpus(system, system / "self").sharing == reason


def test_a_container_with_all_cores_of_the_host_does_not_have_them_alone(system: Path) -> None:
    _write(system / "self/ns/pid", "")
    assert read_host_cpus(system, system / "self").sharing is None
    _write(system / "devices/system/cpu/online", "1,3\n")
    sharing = read_host_cpus(system, system / "self").sharing
    assert sharing == "a container without a CPU set of its own shares its cores with the rest of the host"
