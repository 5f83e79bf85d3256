"""A rendered cluster, on pods that are Ray nodes of this machine: its commands, and what Ray knows of it."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoTokenizer

from cluster.access.tokens import hash_token, make_token
from cluster.client import Credentials, GenerateClient
from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.manifests.inside import BLOCK_HASH_KEY_DIRECTORY, CLUSTER_SECRET_DIRECTORY, INTERNAL_TLS_DIRECTORY
from cluster.manifests.pod_groups import CONFIG_FILE, TLS_DIRECTORY, TOKENS_DIRECTORY, admin_ports
from cluster.manifests.pods import admin_address
from cluster.manifests.render import render
from tests.cluster.access.certificates import Authority
from tests.cluster.manifests.deployments import of_kind, settings, worker_groups
from tests.integration.pods import ROOT, Pods
from tests.integration.served import ask_processes
from tests.kv_transfer.trust.certificates import certified, write_tls_files
from tests.patience import CLUSTER_S
from tests.ports import free_port
from tests.reference import greedy_tokens

_INSIDE = (INTERNAL_TLS_DIRECTORY, CLUSTER_SECRET_DIRECTORY, BLOCK_HASH_KEY_DIRECTORY)
_PROMPT = "def f(n):"
_NUM_TOKENS = 12
MAX_RANKS = 2
"""The ranks of an engine at most: each is a process."""


class Deployment:
    """An overlay's commands on pods that have become its own, what only exists in Kubernetes put in: names and paths.

    config: the demo model, and little memory, instead of what only a GPU could hold; one engine of each role, of
    max_ranks at most
    """

    def __init__(self, overlay: str, pods: Pods, directory: Path, max_ranks: int = MAX_RANKS) -> None:
        chosen = settings(overlay).model_dump(exclude_unset=True, exclude={"model"})
        ports = {"port": free_port(), "http": {"port": free_port()}, **_admin_port(overlay)}
        ingress = {**chosen.get("ingress", {}), **ports, "count": 1}
        chosen |= {"cache": {"kv_cache_memory_gib": 0.05}, "ingress": ingress, "drain_timeout_s": 60.0}
        chosen |= {"model": {"model": str(DEMO_MODEL), "dtype": "float32", "device": "cpu"}}
        for role in ("prefill", "decode"):
            chosen[role] = {**chosen.get(role, {}), "count": 1}
        if (parallel := chosen.get("parallel", {})).get("tensor_parallel_size", 1) > max_ranks:
            chosen["parallel"] = parallel | {"tensor_parallel_size": max_ranks}
        # The demo model is not in the volume.
        kubernetes = {name: value for name, value in chosen.get("kubernetes", {}).items() if name != "models"}
        self.config = ClusterConfig.model_validate({**chosen, "kubernetes": kubernetes})
        self.config_file = directory / "cluster.yaml"
        tls, tokens, inside = (pods.secrets / name for name in ("tls", "tokens", "inside"))
        mounted = {CONFIG_FILE: self.config_file, TLS_DIRECTORY: tls, TOKENS_DIRECTORY: tokens}
        mounted |= dict.fromkeys(_INSIDE, inside)
        text = yaml.safe_dump_all(render(self.config))
        for path, here in mounted.items():
            text = text.replace(path, str(here))
        self.objects: list[Any] = list(yaml.safe_load_all(text))
        self.pods = pods
        pods.become(of_kind(self.objects, "RayCluster"))
        [ingress_pod] = pods.of_group("ingress")
        self.address = f"{ingress_pod.address}:{self.config.ingress.port}"
        """The address at which its ingress is to listen."""
        self.admin_address = f"{ingress_pod.address}:{admin_address(self.config).rpartition(':')[2]}"
        """The address at which its ingress is to listen to operators."""
        self.config_file.write_text(of_kind(self.objects, "ConfigMap", "raypd-config")["data"]["cluster.yaml"])
        _make_secrets(tls, tokens, ingress_pod.address)
        _make_inside(inside)
        self.credentials = Credentials.from_environment(ingress_pod.environment)
        """The pods' own."""

    def start(self) -> str:
        """Do what the Job does; returns its output."""
        [container] = of_kind(self.objects, "Job")["spec"]["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        del variables["RAY_ADDRESS"]
        return self._run_at_the_ingress(container["command"], variables)

    def before_stop(self, group: str) -> str:
        """Do what the hook of that group's one pod does; returns its output."""
        [pod] = self.pods.of_group(group)
        container = worker_groups(self.objects)[group]["template"]["spec"]["containers"][0]
        return self._run_at_the_ingress(container["lifecycle"]["preStop"]["exec"]["command"], pod.environment)

    def raypd(self, *arguments: str) -> list[str]:
        """A command that reads the configuration, from outside of the pods."""
        return ["raypd", *arguments, "--ray-address", self.pods.gcs_address]

    def run(
        self, *command: str, directory: Path | None = None, environment: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Run a command that has to succeed; returns its output. Ray's dashboard is where the Job would find it."""
        variables = {"RAY_ADDRESS": self.pods.dashboard, **environment}
        result = self.pods.run(list(command), variables, CLUSTER_S, directory)
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
        pods = [psutil.Process(pod.process.pid) for pod in self.pods.pods]
        asked = [one for pod in pods for one in ask_processes(psutil.Process.cmdline, pod)]
        [driver] = [process for process, words in asked if words[1:6] == command]
        return driver

    def wait_for_log(self, job: str, pattern: str) -> re.Match[str]:
        """Wait until the log of a submitted job has the pattern."""
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
        while left := self._placement_groups():
            assert time.monotonic() < deadline_s, f"left: {left}"
            time.sleep(0.2)

    def _placement_groups(self) -> list[str]:
        """The names of those that are there."""
        groups = self.pods.ask("/api/v0/placement_groups")["data"]["result"]["result"]
        return [group["name"] for group in groups if group["state"] != "REMOVED"]

    async def check_that_it_serves(self) -> None:
        """Check its probe, and that it answers as transformers does, by a handoff. Raises AssertionError."""
        if not self.credentials.is_encrypted:
            async with grpc.aio.insecure_channel(self.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest()
                probe = await stub.Check(request, timeout=60)  # type: ignore[attr-defined]  # its types
            assert probe.status == health_pb2.HealthCheckResponse.SERVING
        async with self.client() as client:
            answer = client.generate(_PROMPT, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
            responses = [response async for response in answer]
        prompt = AutoTokenizer.from_pretrained(DEMO_MODEL)(_PROMPT)["input_ids"]
        expected = greedy_tokens(DEMO_MODEL, tuple(prompt), _NUM_TOKENS)
        assert [token_id for response in responses for token_id in response.token_ids] == expected
        assert responses[-1].timings.transfer.kv_bytes > 0

    def client(self) -> GenerateClient:
        """With an operator's token, if tokens are asked for."""
        return GenerateClient(self.address, credentials=self.credentials)

    def operator(self) -> GenerateClient:
        """A client of the port for operators."""
        return GenerateClient(self.admin_address, credentials=self.credentials)

    def _run_at_the_ingress(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        service = admin_address(self.config)
        return self.run(*(part.replace(service, self.admin_address) for part in command), environment=environment)


def _admin_port(overlay: str) -> dict[str, int]:
    """A free one, if the overlay has one at all."""
    return {"admin_port": free_port()} if admin_ports(settings(overlay)) else {}


def _make_secrets(tls: Path, tokens: Path, address: str) -> None:
    """Make them as docs/deploy.md says, for an ingress at that address."""
    for directory in (tls, tokens):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    authority = Authority(tls, "ca")
    authority.root.rename(tls / "ca.crt")
    authority.certify("tls", address)
    operator = make_token()
    (tokens / "operator").write_text(operator)
    entry = {"name": "operator", "sha256": hash_token(operator), "admin": True}
    (tokens / "tokens.yaml").write_text(yaml.safe_dump({"tokens": [entry]}))


def _make_inside(directory: Path) -> None:
    """The Secrets of the inside, as the manifests' notes and cert-manager make them; one directory has all files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_tls_files(directory, certified())
    for name in ("secret", "key"):
        (directory / name).write_text(secrets.token_hex(32) + "\n")
    for path in directory.iterdir():
        path.chmod(0o440)
