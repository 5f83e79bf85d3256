"""RayClusters' pods as Ray nodes of this machine: each an own address, started as KubeRay would start it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from tests.patience import CLUSTER_S
from tests.ports import free_port

ROOT: Final = Path(__file__).parents[2]
_BIN: Final = Path(sys.executable).parent
_HEAD_ADDRESS: Final = "127.0.0.2"
_NOT_HERE: Final = {
    # Far too little memory for it here.
    "object-store-memory",
}


class Pod:
    """One Ray node. arguments: of `ray start`; environment: of its container, with its address."""

    def __init__(
        self,
        group: str,
        address: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        process: subprocess.Popen[str],
    ) -> None:
        self.group = group
        self.address = address
        self.arguments = arguments
        self.environment = environment
        self.process = process

    def is_of(self, name: str, group: Any) -> bool:
        """Whether it would be no other pod if it were started for this worker group."""
        wanted = (name, _ray_start_arguments(group), _variables(group, self.address))
        return (self.group, self.arguments, self.environment) == wanted

    def wait_until_up(self) -> None:
        """Raises AssertionError if it ends instead."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError("".join(lines))


class Pods:
    """All pods of a RayCluster manifest, or of one manifest after the other: the head is the same in all.

    secrets: where all of them mount theirs
    """

    def __init__(self, ray_cluster: Any, directory: Path) -> None:  # parsed YAML
        self._head = _head_group(ray_cluster)
        self._directory = directory
        self.secrets = directory / "secrets"
        self._addresses = (f"127.0.0.{number}" for number in range(3, 250))
        self.pods: list[Pod] = []
        self.gcs_port = free_port()
        self.gcs_address = f"{_HEAD_ADDRESS}:{self.gcs_port}"
        self.dashboard = f"http://{_HEAD_ADDRESS}:{free_port()}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        commands = directory / "bin"
        self.environment = inherited | {
            # As KubeRay does for authOptions.mode token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_agent_register_timeout_ms": "150000",
            # Other pods' work is not in their way; here it is, and Ray's workers would yield to everything else.
            "RAY_worker_niceness": "0",
            # Nor have they four nodes' idle workers on two cores.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            # Of four nodes' agents, which nobody looks at.
            "REPORTER_UPDATE_INTERVAL_MS": "600000",
            "RAY_DASHBOARD_AGENT_LOOP_MONITOR_INTERVAL_S": "60",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(commands), str(_BIN), os.environ["PATH"]]),
        }
        # The image's entry point, of this working tree.
        commands.mkdir(parents=True)
        (commands / "raypd").write_text(f'#!/bin/sh\nexec {sys.executable} -m cluster "$@"\n')
        (commands / "raypd").chmod(0o755)

    @classmethod
    @contextmanager
    def started(cls, ray_cluster: Any) -> Iterator[Pods]:
        """Only the head."""
        # Ray's sockets are in it, so its path must be short.
        directory = Path(f"/tmp/rpod{os.getpid()}")
        pods = cls(ray_cluster, directory)
        try:
            pods._start("head", pods._head, _HEAD_ADDRESS)
            pods._wait_for_dashboard()
            yield pods
        finally:
            pods._stop(pods.pods)
            shutil.rmtree(directory, ignore_errors=True)

    def become(self, ray_cluster: Any) -> None:  # parsed YAML
        """Replace the worker pods that are none of this RayCluster's by those that are; returns when Ray has them."""
        assert self.pods[0].is_of("head", _head_group(ray_cluster))
        groups = ray_cluster["spec"]["workerGroupSpecs"]
        wanted = [(group["groupName"], group) for group in groups for _ in range(group["replicas"])]
        kept = [self.pods[0]]
        for pod in self.pods[1:]:
            if (found := next((one for one in wanted if pod.is_of(*one)), None)) is not None:
                wanted.remove(found)
                kept.append(pod)
        self._stop([pod for pod in self.pods if pod not in kept])
        self.pods = kept
        for name, group in wanted:
            self._start(name, group, next(self._addresses))

    def of_group(self, group: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.group == group]

    def run(
        self, command: list[str], environment: Mapping[str, str], timeout_s: float, directory: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a container's command, or one in another directory."""
        return subprocess.run(
            command,
            env=self.environment | dict(environment),
            cwd=directory or self._directory,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ask(self, path: str) -> Any:  # JSON
        """Ray's dashboard."""
        token = self.environment["RAY_AUTH_TOKEN"]
        request = urllib.request.Request(f"{self.dashboard}{path}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def address_of_actor(self, class_name: str) -> str:
        """Return the address of the node that the one living actor of this class is on."""
        [actor] = [one for one in self.actors() if one["class_name"] == class_name and one["state"] == "ALIVE"]
        nodes = self.ask("/api/v0/nodes?detail=1")["data"]["result"]["result"]
        [address] = [node["node_ip"] for node in nodes if node["node_id"] == actor["node_id"]]
        return str(address)

    def actors(self) -> list[Any]:  # JSON
        """All that Ray knows of, dead ones too."""
        actors: list[Any] = self.ask("/api/v0/actors?detail=1&limit=10000")["data"]["result"]["result"]
        return actors

    def _start(self, name: str, group: Any, address: str) -> None:
        """Start one, and return when Ray has it: one after the other, since Ray waits for each node's processes."""
        attempts = range(1, 4)
        for attempt in attempts:
            pod = self._launched(name, group, address, self._directory / f"{address.rpartition('.')[2]}-{attempt}")
            try:
                pod.wait_until_up()
            except AssertionError:
                # Not within Ray's 30 s, on a machine that was busy. Kubernetes would start the container again too.
                if attempt == attempts[-1]:
                    raise
            else:
                self.pods.append(pod)
                return

    def _launched(self, name: str, group: Any, address: str, directory: Path) -> Pod:
        """directory: of this pod alone, since a job's working directory in it is taken away by the node that does not
        need it any more"""
        arguments = [str(_BIN / "ray"), "start", "--block", "--node-ip-address", address, "--disable-usage-stats"]
        if name == "head":
            port = self.dashboard.rpartition(":")[2]
            arguments += ["--head", "--port", str(self.gcs_port)]
            arguments += ["--dashboard-host", _HEAD_ADDRESS, "--dashboard-port", port]
        else:
            arguments += ["--address", self.gcs_address]
        arguments += ["--temp-dir", str(directory)]
        # Each node's agent listens at 127.0.0.1 too, and one that cannot takes no jobs.
        arguments += ["--dashboard-agent-listen-port", str(free_port())]
        # Nobody reads what it sends.
        arguments += ["--include-log-monitor", "false"]
        own_arguments, variables = _ray_start_arguments(group), _variables(group, address)
        arguments += ["--object-store-memory", str(80 * 2**20), *own_arguments]
        directory.mkdir()
        process = subprocess.Popen(
            arguments,
            env=self.environment | variables | {"HOME": str(directory)},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Pod(name, address, own_arguments, variables, process)

    def _wait_for_dashboard(self) -> None:
        deadline_s = time.monotonic() + CLUSTER_S
        while True:
            try:
                self.ask("/api/version")
            except OSError:
                assert time.monotonic() < deadline_s, "Ray's dashboard does not answer"
                time.sleep(0.5)
            else:
                return

    @staticmethod
    def _stop(pods: Sequence[Pod]) -> None:
        family = [child for pod in pods for child in psutil.Process(pod.process.pid).children(recursive=True)]
        for pod in reversed(pods):
            pod.process.send_signal(signal.SIGTERM)
        for pod in pods:
            pod.process.wait(CLUSTER_S)
            assert pod.process.stdout is not None
            pod.process.stdout.close()
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()


def _head_group(ray_cluster: Any) -> Any:
    # As of all of ours: self.environment has the token that KubeRay would have made.
    assert ray_cluster["spec"]["authOptions"] == {"mode": "token"}
    return ray_cluster["spec"]["headGroupSpec"]


def _variables(group: Any, address: str) -> dict[str, str]:
    """Return the environment of a group's container; what Kubernetes would fill in is the pod's address."""
    return {one["name"]: one.get("value", address) for one in group["template"]["spec"]["containers"][0]["env"]}


def _ray_start_arguments(group: Any) -> list[str]:
    """Do as updateRayStartParamsResources and updateRayStartParamsLabels with a group (KubeRay v1.7.0, pod.go)."""
    params = {name: value for name, value in group["rayStartParams"].items() if name not in _NOT_HERE}
    custom = {}
    for name, amount in group["resources"].items():
        if name.lower() == "cpu":
            params["num-cpus"] = amount
        elif name.lower() == "memory":
            params["memory"] = amount
        elif name.lower().endswith("gpu"):
            params["num-gpus"] = amount
        else:
            custom[name] = float(amount)
    if custom:
        params["resources"] = json.dumps(custom)
    params["labels"] = ",".join(f"{name}={value}" for name, value in group["labels"].items())
    return [f"--{name}={value}" for name, value in params.items()]
