"""A rendered cluster, on pods that are Ray nodes of this machine: its commands, and what Ray knows of it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import GenerateClient
from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.manifests.placement import CONFIG_FILE
from cluster.manifests.pods import admin_address
from cluster.manifests.render import render
from tests.cluster.manifests.deployments import of_kind, settings, worker_groups
from tests.integration.pods import ROOT, Pods, free_port
from tests.patience import CLUSTER_S


class Deployment:
    """An overlay's commands with what only exists in Kubernetes put in: names and paths."""

    def __init__(self, overlay: str, directory: Path) -> None:
        chosen = settings(overlay).model_dump(exclude_unset=True, exclude={"model"})
        # The demo model, and little memory, instead of what only a GPU could hold.
        ports = {"port": free_port(), "http": {"port": free_port()}}
        ingress = {**chosen.get("ingress", {}), **ports, "count": 1}
        chosen |= {"cache": {"kv_cache_memory_gib": 0.05}, "ingress": ingress, "drain_timeout_s": 10.0}
        chosen |= {"model": {"model": str(DEMO_MODEL), "dtype": "float32", "device": "cpu"}}
        # One engine of each role, without the secrets and the volume that somebody would have made beforehand.
        for role in ("prefill", "decode"):
            chosen[role] = {**chosen.get(role, {}), "count": 1}
        kubernetes = chosen.get("kubernetes", {})
        chosen["kubernetes"] = {
            name: value for name, value in kubernetes.items() if name not in {"tls", "tokens", "models"}
        }
        self.config = ClusterConfig.model_validate(chosen)
        self.objects = render(self.config)
        self.config_file = directory / "cluster.yaml"
        self.config_file.write_text(of_kind(self.objects, "ConfigMap", "raypd-config")["data"]["cluster.yaml"])
        self.pods: Pods

    @classmethod
    @contextmanager
    def started(cls, overlay: str, directory: Path) -> Iterator[Deployment]:
        deployment = cls(overlay, directory)
        with Pods.started(of_kind(deployment.objects, "RayCluster")) as deployment.pods:
            yield deployment

    @property
    def address(self) -> str:
        """Where its ingress is to listen."""
        [ingress] = self.pods.of_group("ingress")
        return f"{ingress.address}:{self.config.ingress.port}"

    @property
    def submit(self) -> list[str]:
        """The command of the Job."""
        [container] = of_kind(self.objects, "Job")["spec"]["template"]["spec"]["containers"]
        return [self._here(part) for part in container["command"]]

    def pre_stop(self, group: str) -> list[str]:
        """The hook of that group's pods."""
        container = worker_groups(self.objects)[group]["template"]["spec"]["containers"][0]
        return [self._here(part) for part in container["lifecycle"]["preStop"]["exec"]["command"]]

    def raypd(self, *arguments: str) -> list[str]:
        """A command that reads the configuration, from outside of the pods."""
        return ["raypd", *arguments, "--ray-address", self.pods.gcs_address]

    def run(self, *command: str, directory: Path | None = None, **environment: str) -> str:
        """What a command prints that succeeds; Ray's dashboard is where the Job would find it."""
        submitter = {"RAY_ADDRESS": self.pods.dashboard}
        result = self.pods.run(list(command), submitter | environment, CLUSTER_S, directory)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def serve(self, *arguments: str) -> subprocess.Popen[str]:
        """`raypd serve` with the configuration, attached."""
        return subprocess.Popen(
            self.raypd("serve", "--config", str(self.config_file), *arguments),
            cwd=ROOT,
            env=self.pods.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def driver_process(self) -> psutil.Process:
        """The one `raypd serve` on a pod."""
        command = ["-m", "cluster", "serve", "--config", str(self.config_file)]
        pods = (psutil.Process(pod.process.pid) for pod in self.pods.pods)
        [driver] = [one for pod in pods for one in pod.children(recursive=True) if one.cmdline()[1:6] == command]
        return driver

    def wait_for_log(self, job: str, pattern: str) -> re.Match[str]:
        """Of a submitted job."""
        deadline_s = time.monotonic() + CLUSTER_S
        while True:
            logs = str(self.pods.ask(f"/api/jobs/{job}/logs")["logs"])
            if (found := re.search(pattern, logs)) is not None:
                return found
            assert self.pods.ask(f"/api/jobs/{job}")["status"] in {"PENDING", "RUNNING"}, logs
            assert time.monotonic() < deadline_s, logs
            time.sleep(0.2)

    def alive_actors(self) -> list[str]:
        """Classes of raypd's actors, sorted."""
        # The job's own supervisor belongs to Ray.
        actors = [actor["class_name"] for actor in self.pods.actors() if actor["state"] == "ALIVE"]
        return sorted(name for name in actors if name != "JobSupervisor")

    def wait_until_gone(self) -> None:
        """Raises AssertionError if anything of raypd is left in the Ray cluster."""
        deadline_s = time.monotonic() + CLUSTER_S
        while alive := self.alive_actors():
            assert time.monotonic() < deadline_s, f"left: {alive}"
            time.sleep(0.2)
        groups = self.pods.ask("/api/v0/placement_groups")["data"]["result"]["result"]
        assert [group["name"] for group in groups if group["state"] != "REMOVED"] == []

    def _here(self, text: str) -> str:
        return text.replace(admin_address(self.config), self.address).replace(CONFIG_FILE, str(self.config_file))


async def check_that_it_serves(address: str) -> None:
    """That its probe says so, and that it answers by a handoff. Raises AssertionError."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        probe = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]  # its types
    assert probe.status == health_pb2.HealthCheckResponse.SERVING
    async with GenerateClient(address) as client:
        responses = [response async for response in client.generate("def f(n):", max_tokens=8, temperature=0.0)]
    assert "".join(response.text for response in responses)
    assert responses[-1].timings.transfer.kv_bytes > 0
