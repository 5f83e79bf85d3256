"""Each trouble of a node is named, with what to change; a node without troubles has none.

Tests of cluster/commands/doctor/cluster.py, cluster/commands/doctor/findings.py, actors/process/device_probe.py.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from actors.process.device_probe import probe_devices
from cluster.checks.internal_files import InternalFiles
from cluster.commands.doctor import node as node_module
from cluster.commands.doctor.cluster import NodeLook, judge_clocks, judge_ingress_room, judge_room, judge_versions
from cluster.commands.doctor.findings import GIB, Finding, Verdict
from cluster.commands.doctor.node import (
    Gpu,
    NodeFacts,
    _count_nvlinks,
    _driver_version,
    _rdma_devices,
    judge_node,
    look_at_node,
)
from cluster.config import ClusterConfig
from cluster.pool.ray_objects.ray_nodes import Node

_H200 = Gpu("NVIDIA H200", 139 * GIB, 140 * GIB)
_GOOD = NodeFacts(
    hostname="gpu-1",
    python="3.11.7",
    ray="2.60.0",
    free_memory_bytes=500 * GIB,
    num_cpus=96,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    max_files=65536,
    memlock_bytes=None,
    driver="580.65.06",
    torch="2.13.0",
    cuda="13.0",
    gpus=(_H200,) * 8,
    peers=True,
    nvlink=144,
    cupy="14.2.0",
    nccl=22809,
    rdma={"mlx5_0": "ACTIVE"},
)


def _by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_good_gpu_node_has_nothing_to_change() -> None:
    findings = judge_node(_GOOD, num_gpus=2)

    assert [finding for finding in findings if finding.verdict is not Verdict.OK or finding.advice] == []
    assert _by_check(findings)["NCCL through cupy"].found == "cupy 14.2.0, NCCL 2.28.9"


_TROUBLES: dict[str, tuple[dict[str, Any], str, Verdict, str]] = {
    "no driver": ({"driver": None}, "GPUs", Verdict.FAILURE, "install one"),
    "torch without CUDA": ({"cuda": None}, "GPUs", Verdict.FAILURE, "a CUDA build of torch"),
    "driver too old": ({"gpus": ()}, "GPUs", Verdict.FAILURE, "a driver for this CUDA or a newer one"),
    "too few GPUs": ({"gpus": (_H200,)}, "GPUs", Verdict.FAILURE, "lower parallel.tensor_parallel_size"),
    "no cupy": ({"cupy": None}, "NCCL through cupy", Verdict.FAILURE, "pip install 'raypd[cuda13]'"),
    "old cupy": ({"cupy": "13.6.0"}, "NCCL through cupy", Verdict.FAILURE, "pip install 'raypd[cuda13]'"),
    "no NCCL": ({"nccl": None}, "NCCL through cupy", Verdict.FAILURE, "pip install nvidia-nccl-cu13"),
    "no NVLink": ({"nvlink": 0, "peers": False}, "NVLink", Verdict.WARNING, "choose nodes with NVLink"),
    "RDMA port down": ({"rdma": {"mlx5_0": "DOWN"}}, "RDMA", Verdict.WARNING, "subnet manager"),
    "locked memory": ({"memlock_bytes": 65536}, "RDMA", Verdict.FAILURE, "ulimit -l unlimited"),
    "small /dev/shm": ({"shm_free_bytes": 64 * 2**20}, "/dev/shm", Verdict.FAILURE, "--shm-size"),
    "few files": ({"max_files": 1024}, "open files", Verdict.WARNING, "ulimit -n 65536"),
    "port taken": (
        {"taken_ports": ("0.0.0.0:50051 (in use)",)},
        "port",
        Verdict.WARNING,
        "another port for the ingress",
    ),
    "no torch": ({"torch": None, "errors": ("torch: ImportError",)}, "node", Verdict.FAILURE, "dependencies"),
}


@pytest.mark.parametrize("trouble", _TROUBLES)
def test_a_trouble_is_named_with_what_to_change(trouble: str) -> None:
    change, check, verdict, advice = _TROUBLES[trouble]

    findings = _by_check(judge_node(replace(_GOOD, **change), num_gpus=2))

    assert findings[check].verdict is verdict
    assert advice in findings[check].advice
    assert [name for name, finding in findings.items() if finding.verdict is not Verdict.OK] == [check]


def test_a_node_for_cpus_needs_no_gpu_and_no_nccl() -> None:
    facts = replace(_GOOD, driver=None, cuda=None, gpus=(), cupy=None, nccl=None, nvlink=None, peers=None, rdma={})

    assert {finding.verdict for finding in judge_node(facts, num_gpus=0)} == {Verdict.OK}


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"torch": "2.13.0", "gpus": [{"name": "G", "free_bytes": 1, "total_bytes": 2}], "errors": ["cupy: no"]}
    monkeypatch.setattr(node_module, "_probe_devices", lambda: devices)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = look_at_node("127.0.0.1", (0, port), InternalFiles(secret=Path("/nowhere/secret")))

    assert (facts.torch, facts.gpus, facts.errors) == ("2.13.0", (Gpu("G", 1, 2),), ("cupy: no",))
    [found] = facts.taken_ports
    assert found.startswith(f"127.0.0.1:{port} ")
    assert facts.free_memory_bytes > 0
    assert facts.shm_bytes >= facts.shm_free_bytes > 0


def test_devices_are_asked_without_a_failure_where_there_are_none() -> None:
    facts = probe_devices()

    assert facts["torch"]
    assert facts["errors"] == []


def test_a_probe_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    assert node_module._probe_devices() == {"errors": ["the search for devices ended with status 1: "]}


def test_rdma_ports_are_read_from_the_kernel(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    (tmp_path / "odd").mkdir()

    assert _rdma_devices(tmp_path) == {"mlx5_0": "ACTIVE", "mlx5_1": "DOWN", "odd": "unreadable"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs@x)\n",
            "580.65.06",
        ),
        ("something else", "of unknown version"),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(text: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(text)

    assert _driver_version(file) == version
    assert _driver_version(tmp_path / "none") is None


_NVLINK_STATUS = """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
"""


@pytest.mark.parametrize(("said", "num_links"), [(_NVLINK_STATUS, 3), ("", 0), (None, None)])
def test_nvlinks_that_are_up_are_counted(
    said: str | None, num_links: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: there is no nvidia-smi."""
    if said is not None:
        (tmp_path / "said").write_text(said)
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\n[ "$*" = "nvlink --status" ] && exec /bin/cat {tmp_path / "said"}\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert _count_nvlinks() == num_links


def test_a_gpus_memory_and_the_versions_of_what_drives_it_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs as torch would tell of them, and cupy with torch's NCCL."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (100 + index, 200),
        "get_device_name": lambda index: "NVIDIA H200",
        "can_device_access_peer": lambda one, other: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    nccl = SimpleNamespace(available=True, get_version=lambda: 22809)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "14.2.0", raising=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda", ModuleType("cupy.cuda"))
    monkeypatch.setattr(sys.modules["cupy.cuda"], "nccl", nccl, raising=False)

    facts = probe_devices()

    assert (facts["cuda"], facts["peers"], facts["cupy"], facts["nccl"], facts["errors"]) == (
        *("13.0", True, "14.2.0", 22809),
        [],
    )
    assert facts["gpus"] == [
        {"name": "NVIDIA H200", "free_bytes": 100 + index, "total_bytes": 200} for index in range(2)
    ]


def _node(number: int, **resources: float) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", f"host{number}", {"CPU": 4.0, **resources}, {})


def test_clocks_that_differ_are_named() -> None:
    names = {"a": "10.0.0.1", "b": "10.0.0.2"}

    assert judge_clocks({"a": 0.01, "b": -0.2}, names).found == "2 nodes within 0.20 s"
    finding = judge_clocks({"a": 0.01, "b": -4.2}, names)
    assert (finding.verdict, finding.found) == (Verdict.WARNING, "10.0.0.2 -4.2 s")


def test_versions_that_differ_are_named() -> None:
    looks = [NodeLook(_node(1), _GOOD), NodeLook(_node(2), replace(_GOOD, ray="2.59.0")), NodeLook(_node(3), None)]

    assert judge_versions(looks[:1]).verdict is Verdict.OK
    finding = judge_versions(looks)
    assert finding.verdict is Verdict.FAILURE
    assert finding.found == "Python 3.11.7 and Ray 2.60.0 on 10.0.0.1; Python 3.11.7 and Ray 2.59.0 on 10.0.0.2"


def test_room_is_counted_for_all_roles_together() -> None:
    config = ClusterConfig.model_validate(
        {"prefill": {"count": 1, "num_cpus": 4}, "decode": {"count": 2, "num_cpus": 3, "num_gpus": 1}}
    )
    nodes = [_node(1), _node(2, GPU=1.0), _node(3)]

    verdicts = [(finding.check, finding.verdict) for finding in judge_room(config, nodes)]
    assert verdicts == [("room for prefill engines", Verdict.OK), ("room for decode engines", Verdict.WARNING)]
    assert judge_room(config, nodes)[1].found.startswith("for 1 of 2: each needs {'CPU': 3.0, 'GPU': 1.0} on one node")
    assert judge_room(config, nodes[:1])[1].verdict is Verdict.FAILURE


_INGRESS_NODES = [
    Node("a", "10.0.0.1", "a", {"raypd_ingress": 1.0}, {"zone": "x"}),
    Node("b", "10.0.0.2", "b", {"raypd_ingress": 1.0}, {"zone": "y"}),
    Node("c", "10.0.0.3", "c", {}, {"zone": "x"}),
]


@pytest.mark.parametrize(
    ("ingress", "verdict", "found"),
    [
        ({"count": 9}, Verdict.OK, "9 of 9"),
        ({"count": 2, "resources": {"raypd_ingress": 1}}, Verdict.OK, "2 of 2"),
        ({"count": 3, "resources": {"raypd_ingress": 1}}, Verdict.WARNING, "2 of 3: each needs {'raypd_ingress': 1.0}"),
        ({"resources": {"raypd_ingress": 2}}, Verdict.FAILURE, "0 of 1: each needs {'raypd_ingress': 2.0}"),
        ({"per_node": True, "labels": {"zone": "x"}}, Verdict.OK, "one on each of 2 nodes"),
        ({"per_node": True, "labels": {"zone": "z"}}, Verdict.FAILURE, "no node is labelled {'zone': 'z'}"),
    ],
)
def test_ingresses_have_room_where_their_resources_and_labels_are(
    ingress: dict[str, object], verdict: Verdict, found: str
) -> None:
    finding = judge_ingress_room(ClusterConfig.model_validate({"ingress": ingress}), _INGRESS_NODES)

    assert (finding.check, finding.verdict) == ("room for ingresses", verdict)
    assert found in finding.found
