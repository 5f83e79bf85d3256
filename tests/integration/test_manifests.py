"""What the manifests would start, started: their Ray nodes, their Job, their probe and their preStop hooks."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import GenerateClient
from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.manifests.placement import CONFIG_FILE
from cluster.manifests.pods import ingress_address
from cluster.manifests.render import render
from tests.cluster.manifests.deployments import of_kind, settings, worker_groups
from tests.integration.pods import Pods, free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

_START_TIMEOUT_S = 300.0


class _Deployment:
    """A rendered cluster, and its commands with what only exists in Kubernetes put in: names and paths."""

    def __init__(self, overlay: str, directory: Path) -> None:
        chosen = settings(overlay).model_dump(exclude_unset=True, exclude={"model"})
        # The demo model, and little memory, instead of what only a GPU could hold.
        ports = {"port": free_port(), "http": {"port": free_port()}}
        ingress = {**chosen.get("ingress", {}), **ports, "count": 1}
        chosen |= {"cache": {"kv_cache_memory_gib": 0.05}, "ingress": ingress, "drain_timeout_s": 10.0}
        chosen |= {"model": {"model": str(DEMO_MODEL), "dtype": "float32", "device": "cpu"}}
        self.config = ClusterConfig.model_validate(chosen)
        self.objects = render(self.config)
        self._config_file = directory / "cluster.yaml"
        self._config_file.write_text(of_kind(self.objects, "ConfigMap", "raypd-config")["data"]["cluster.yaml"])
        self.address = ""

    @property
    def submit(self) -> list[str]:
        [container] = of_kind(self.objects, "Job")["spec"]["template"]["spec"]["containers"]
        return [self._here(part) for part in container["command"]]

    def doctor(self, pods: Pods) -> list[str]:
        # The GPUs of these pods are only numbers.
        return ["raypd", "doctor", "--config", str(self._config_file), "--ray-address", pods.gcs_address]

    def pre_stop(self, group: str) -> list[str]:
        container = worker_groups(self.objects)[group]["template"]["spec"]["containers"][0]
        return [self._here(part) for part in container["lifecycle"]["preStop"]["exec"]["command"]]

    def _here(self, text: str) -> str:
        return text.replace(ingress_address(self.config), self.address).replace(CONFIG_FILE, str(self._config_file))


def _is_open(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _succeed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


async def _check_that_it_serves(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        probe = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]  # its types
    assert probe.status == health_pb2.HealthCheckResponse.SERVING
    async with GenerateClient(address) as client:
        responses = [response async for response in client.generate("def f(n):", max_tokens=8, temperature=0.0)]
    assert responses[-1].timings.transfer.kv_bytes > 0


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu-1p1d"])
async def test_the_job_starts_a_cluster_on_the_pods_and_each_pod_drains_before_it_stops(
    overlay: str, tmp_path: Path
) -> None:
    deployment = _Deployment(overlay, tmp_path)
    with Pods.started(of_kind(deployment.objects, "RayCluster")) as pods:
        [ingress], [prefill], [decode] = (pods.of_group(group) for group in ("ingress", "prefill", "decode"))
        deployment.address = f"{ingress.address}:{deployment.config.ingress.port}"
        submitter = {"RAY_ADDRESS": pods.dashboard}

        examined = _succeed(pods.run(deployment.doctor(pods), {}, _START_TIMEOUT_S))
        assert "failure" not in examined
        assert all(f"ok       room for {role} engines: 1 of " in examined for role in ("prefill", "decode")), examined
        assert examined.count(" node: Python ") == len(pods.pods)
        said = _succeed(pods.run(deployment.submit, submitter, _START_TIMEOUT_S))
        assert re.search(rf"ready .* at {deployment.address} \(gRPC", said), said
        assert _succeed(pods.run(deployment.submit, submitter, 60)) == "it serves already\n"

        await _check_that_it_serves(deployment.address)
        async with GenerateClient(deployment.address) as client:
            status = await client.status(10)
        assert {(engine.engine_id, engine.node) for engine in status.engines} == {
            ("prefill-0", prefill.address),
            ("decode-0", decode.address),
        }
        assert pods.address_of_actor("IngressActor") == ingress.address
        assert pods.address_of_actor("Controller") in {ingress.address, prefill.address, decode.address}

        drained = {"RAYPD_NODE_IP": decode.address}
        assert "it had: decode-0\ndone" in _succeed(pods.run(deployment.pre_stop("decode"), drained, 60))
        drained = {"RAYPD_NODE_IP": ingress.address}
        assert f"it had: {deployment.address}\ndone" in _succeed(pods.run(deployment.pre_stop("ingress"), drained, 60))
        assert not _is_open(deployment.address)
