"""Checks of one node: collecting the facts about it, and judging them."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from actors.model.cache.host_memory import free_host_memory_bytes
from cluster.checks.internal_files import InternalFiles
from cluster.checks.startup_checks import why_not_listen
from cluster.commands.doctor.findings import GIB, Finding, failure, gib, ok, warning

_PROBE_TIMEOUT_S: Final = 120.0
_TOOL_TIMEOUT_S: Final = 20.0
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_INFINIBAND: Final = Path("/sys/class/infiniband")
_SHM: Final = Path("/dev/shm")
_MIN_SHM_BYTES: Final = 256 * 2**20
"""The size of Ray's object store, for which /dev/shm needs room; Ray may run on the node already and use it."""
_MIN_FILES: Final = 4096
_GPU_SHM_BYTES: Final = 2 * GIB
"""The additional need of an engine with several GPUs: NCCL's ranks of one host communicate through /dev/shm."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that CUDA sees."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts about a node at one moment.

    memlock_bytes: limit on locked memory; None without a limit
    driver:        version of the NVIDIA driver; None without one
    torch, cuda:   version of torch, and of the CUDA that it was built for; None without them
    peers:         whether the GPUs reach each other's memory; None with fewer than two GPUs, or if unknown
    nvlink:        number of NVLink links that are up; None if nvidia-smi could not tell
    cupy, nccl:    version of cupy, and of NCCL as a number; None without them
    rdma:          state of the first port of each RDMA device, by the device's name
    errors:        what went wrong while devices were looked for
    taken_ports:   the ingress's addresses at which nothing can listen, each with the reason
    file_mistakes: why the files of the cluster's secrets and certificates cannot be used on this node
    """

    hostname: str
    python: str
    ray: str
    free_memory_bytes: int
    num_cpus: int
    shm_bytes: int
    shm_free_bytes: int
    max_files: int
    memlock_bytes: int | None
    driver: str | None
    torch: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...]
    peers: bool | None
    nvlink: int | None
    cupy: str | None
    nccl: int | None
    rdma: dict[str, str]
    errors: tuple[str, ...] = ()
    taken_ports: tuple[str, ...] = ()
    file_mistakes: tuple[str, ...] = ()


def look_at_node(host: str, ports: Collection[int], files: InternalFiles) -> NodeFacts:
    """Collect the facts about this node. It takes seconds, since a child process imports torch.

    host, ports: where an ingress would listen; port 0 is not checked
    files:       the files of the cluster's secrets and certificates that this node needs
    """
    shm = os.statvfs(_SHM)
    devices = _probe_devices()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NodeFacts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        ray=metadata.version("ray"),
        free_memory_bytes=free_host_memory_bytes(),
        num_cpus=len(os.sched_getaffinity(0)),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        driver=_driver_version(_DRIVER_FILE),
        torch=devices.get("torch"),
        cuda=devices.get("cuda"),
        gpus=tuple(Gpu(one["name"], one["free_bytes"], one["total_bytes"]) for one in devices.get("gpus", ())),
        peers=devices.get("peers"),
        nvlink=_count_nvlinks(),
        cupy=devices.get("cupy"),
        nccl=devices.get("nccl"),
        rdma=_rdma_devices(_INFINIBAND),
        errors=tuple(devices.get("errors", ())),
        taken_ports=tuple(filter(None, (_taken_port(host, port) for port in ports))),
        file_mistakes=tuple(files.find_mistakes()),
    )


def judge_node(facts: NodeFacts, num_gpus: int) -> list[Finding]:
    """Return the findings about a node. num_gpus: the GPUs that an engine on this node needs; 0 without GPUs"""
    findings = [_judge_versions(facts), _judge_driver(facts, num_gpus)]
    if num_gpus:
        findings += [_judge_nccl(facts), _judge_peers(facts, num_gpus), _judge_rdma(facts)]
    findings += [judge_shm(facts.shm_bytes, facts.shm_free_bytes, num_gpus), _judge_files(facts)]
    advice = "end the process that listens there (another raypd?), or choose another port for the ingress"
    findings += [warning("port", f"{taken} is taken", advice) for taken in facts.taken_ports]
    advice = "every node needs this file, at the same path and readable for raypd's user; see docs/security.md"
    findings += [failure("files", mistake, advice) for mistake in facts.file_mistakes]
    return findings


def judge_shm(size_bytes: int, free_bytes: int, num_gpus: int) -> Finding:
    """Check the size of /dev/shm. num_gpus: the GPUs that an engine on this node needs."""
    wanted = _MIN_SHM_BYTES + _GPU_SHM_BYTES * (num_gpus > 1)
    found = f"{gib(free_bytes)} of {gib(size_bytes)} free"
    if free_bytes < wanted:
        advice = f"{wanted // 2**20} MiB at least: docker run --shm-size, an emptyDir of medium Memory in Kubernetes"
        return failure("/dev/shm", found, advice)
    return ok("/dev/shm", found)


def _judge_versions(facts: NodeFacts) -> Finding:
    found = f"Python {facts.python}, Ray {facts.ray}, torch {facts.torch}, {facts.num_cpus} CPUs"
    found += f", {gib(facts.free_memory_bytes)} free"
    if facts.torch is None:
        return failure("node", f"{found}; {'; '.join(facts.errors)}", "install raypd's dependencies on this node")
    return ok("node", found)


def _judge_driver(facts: NodeFacts, num_gpus: int) -> Finding:
    check = "GPUs"
    if not num_gpus:
        found = f"{len(facts.gpus)}, none is needed" if facts.gpus else "none, and none is needed"
        return ok(check, found)
    if facts.driver is None:
        return failure(check, "no NVIDIA driver", "install one, or give the container GPUs (nvidia.com/gpu)")
    if facts.cuda is None:
        found = f"driver {facts.driver}, but torch {facts.torch} was built without CUDA"
        return failure(check, found, "install a CUDA build of torch")
    if not facts.gpus:
        found = f"driver {facts.driver}, torch for CUDA {facts.cuda} sees no GPU; {'; '.join(facts.errors)}"
        advice = "install a driver for this CUDA or a newer one, and check that CUDA_VISIBLE_DEVICES is not empty"
        return failure(check, found.rstrip("; "), advice)
    if len(facts.gpus) < num_gpus:
        found = f"{len(facts.gpus)} of the {num_gpus} that an engine needs on one node"
        return failure(check, found, "lower parallel.tensor_parallel_size, or use nodes with more GPUs")
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
    free = gib(min(gpu.free_bytes for gpu in facts.gpus))
    found = f"{len(facts.gpus)} x {names}, at least {free} free each, driver {facts.driver}, CUDA {facts.cuda}"
    return ok(check, found)


def _judge_nccl(facts: NodeFacts) -> Finding:
    check = "NCCL through cupy"
    extra = f"cuda{(facts.cuda or '13').partition('.')[0]}"
    if facts.cupy is None:
        errors = [error for error in facts.errors if error.startswith("cupy")]
        return failure(check, "; ".join(errors) or "cupy is not installed", f"pip install 'raypd[{extra}]'")
    if int(facts.cupy.partition(".")[0]) < 14:
        return failure(check, f"cupy {facts.cupy}; 14 is the first that works", f"pip install 'raypd[{extra}]'")
    if facts.nccl is None:
        advice = (
            f"pip install nvidia-nccl-cu{extra.removeprefix('cuda')}, for the same CUDA as torch, and no other NCCL"
        )
        return failure(check, f"cupy {facts.cupy} finds no libnccl.so.2", advice)
    return ok(check, f"cupy {facts.cupy}, NCCL {_nccl_version(facts.nccl)}")


def _judge_peers(facts: NodeFacts, num_gpus: int) -> Finding:
    check = "NVLink"
    if facts.nvlink:
        return ok(check, f"{facts.nvlink} links are up")
    found = "unknown, since nvidia-smi could not tell" if facts.nvlink is None else "no link is up"
    if num_gpus > 1 and not facts.peers:
        advice = "ranks of an engine communicate through host memory: choose nodes with NVLink, or fewer ranks"
        return warning(check, f"{found}; GPUs do not reach each other's memory", advice)
    return ok(check, found)


def _judge_rdma(facts: NodeFacts) -> Finding:
    check = "RDMA"
    active = sorted(name for name, state in facts.rdma.items() if state == "ACTIVE")
    if not facts.rdma:
        return ok(check, "no device: KV goes over TCP between nodes (NCCL_IB_DISABLE=1 spares NCCL the search)")
    if not active:
        states = ", ".join(f"{name} {state}" for name, state in sorted(facts.rdma.items()))
        advice = "check the cable, the subnet manager, and the device plugin's settings"
        return warning(check, f"no port is active: {states}", advice)
    if facts.memlock_bytes is not None and facts.memlock_bytes < GIB:
        advice = "set ulimit -l unlimited; in Kubernetes LimitMEMLOCK=infinity for the container runtime, and IPC_LOCK"
        return failure(check, f"only {gib(facts.memlock_bytes)} may be locked, and RDMA locks its buffers", advice)
    return ok(check, f"active: {', '.join(active)}; NCCL_IB_HCA chooses among them")


def _judge_files(facts: NodeFacts) -> Finding:
    found = f"{facts.max_files} at once"
    if facts.max_files < _MIN_FILES:
        return warning("open files", found, f"set ulimit -n {_MIN_FILES * 16}: each stream and each link needs one")
    return ok("open files", found)


def _nccl_version(number: int) -> str:
    """Return a version as NCCL writes it: 22809 is 2.28.9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _probe_devices() -> dict[str, Any]:
    command = [sys.executable, "-m", "actors.process.device_probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
        devices: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"errors": [f"the devices did not answer within {_PROBE_TIMEOUT_S:g} s"]}
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().splitlines()[-1:]
        return {"errors": [f"the search for devices ended with status {error.returncode}: {''.join(last)}"]}
    except ValueError as error:
        return {"errors": [f"the search for devices gave no answer: {error}"]}
    return devices


def _driver_version(file: Path) -> str | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    found = re.search(r"Module(?: for \S+)?\s+([\d.]+)", text)
    return found.group(1) if found else "of unknown version"


def _count_nvlinks() -> int | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "nvlink", "--status"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return len(re.findall(r"Link \d+: [\d.]+ GB/s", done.stdout))


def _rdma_devices(directory: Path) -> dict[str, str]:
    states = {}
    for device in sorted(directory.glob("*")):
        try:
            # The file holds a line such as "4: ACTIVE".
            states[device.name] = (device / "ports" / "1" / "state").read_text().partition(":")[2].strip()
        except OSError:
            states[device.name] = "unreadable"
    return states


def _taken_port(host: str, port: int) -> str:
    reason = why_not_listen(host, port)
    return "" if reason is None else f"{host}:{port} ({reason})"
