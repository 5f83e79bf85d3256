"""The start of raypd in a RayCluster: the ConfigMaps of its settings, and the Job that submits `raypd serve`."""

from __future__ import annotations

import math
from typing import Final

from cluster.config import ClusterConfig
from cluster.manifests.objects import (
    DASHBOARD_PORT,
    POD_SECURITY,
    SUBMITTER_LABEL,
    Manifest,
    common_labels,
    container_security,
    environment,
    from_secret,
    manifest,
)
from cluster.manifests.pod_groups import CONFIG_FILE, config_file
from cluster.manifests.pods import admin_address
from cluster.manifests.secret_files import credential_mounts, credential_variables, credential_volumes
from cluster.parameters.json_types import JSON

_TRIES: Final = 5
_IMAGE_PULL_S: Final = 1200


def config_map(config: ClusterConfig) -> Manifest:
    """Render the ConfigMap of the settings that `raypd serve` reads."""
    name = f"{config.kubernetes.name}-config"
    return manifest("v1", "ConfigMap", name, config.kubernetes, data={"cluster.yaml": config_file(config)})


def nccl_config_map(config: ClusterConfig) -> Manifest:
    """Render the ConfigMap with the environment variables of pods with GPUs."""
    rdma = config.kubernetes.rdma
    variables = {
        "NCCL_DEBUG": "WARN",
        # eth0 is the interface of the pod network; an RDMA network has a separate interface.
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    if rdma is None:
        variables["NCCL_IB_DISABLE"] = "1"
    else:
        # NCCL sends a lost packet again up to 7 times, each time after 4.096 us * 2^20, about 4 s.
        variables |= {"NCCL_IB_HCA": "mlx5", "NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7"}
    variables |= config.kubernetes.nccl
    data: dict[str, JSON] = dict(variables)
    return manifest("v1", "ConfigMap", f"{config.kubernetes.name}-nccl", config.kubernetes, data=data)


def serve_job(config: ClusterConfig, image: str) -> Manifest:
    """Render the Job that starts raypd. It ends when the cluster serves or its start has failed.

    The driver, `raypd serve --detach`, runs on the head and leaves the cluster running.
    """
    kubernetes = config.kubernetes
    head = f"http://{kubernetes.name}-head-svc.{kubernetes.namespace}.svc:{DASHBOARD_PORT}"
    labels: Manifest = {**common_labels(kubernetes), SUBMITTER_LABEL: "true"}
    pod = submitter_pod(
        config,
        image,
        command=["/bin/sh", "-c", submit_script(config)],
        env=[
            *environment({"RAY_ADDRESS": head, "RAY_AUTH_MODE": "token"}),
            *environment(credential_variables(kubernetes)),
            # KubeRay makes this Secret, under the name of the RayCluster.
            from_secret("RAY_AUTH_TOKEN", kubernetes.name, "auth_token"),
        ],
    )
    spec: Manifest = {
        "backoffLimit": _TRIES,
        "activeDeadlineSeconds": _IMAGE_PULL_S + _TRIES * math.ceil(config.start_timeout_s),
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return manifest("batch/v1", "Job", f"{kubernetes.name}-serve", kubernetes, spec=spec)


def submitter_pod(config: ClusterConfig, image: str, **container_parts: JSON) -> Manifest:
    """Render a pod that submits a Ray job to the head. container_parts: further fields of the pod's container"""
    kubernetes = config.kubernetes
    home: Manifest = {"name": "HOME", "value": "/tmp"}
    given = container_parts.pop("env", [])
    assert isinstance(given, list)
    container: Manifest = {
        "name": "submit",
        "image": image,
        **container_parts,
        "env": [home, *given],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *credential_mounts(kubernetes)],
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": dict(POD_SECURITY),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *credential_volumes(kubernetes, is_ingress=False)],
    }
    if kubernetes.image_pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": kubernetes.image_pull_secret}]
    return pod


def submit_script(config: ClusterConfig) -> str:
    """Return the shell script of the Job. It ends at once if the cluster serves already.

    The script waits for Ray's dashboard and not until pods are ready: ingresses are ready only after this start.
    """
    return (
        "set -eu\n"
        f"if raypd status --address {admin_address(config)} --timeout 5 > /dev/null 2>&1; then\n"
        '  echo "the cluster serves already"\n'
        "  exit 0\n"
        "fi\n"
        "until ray job list > /dev/null 2>&1; do\n"
        '  echo "waiting for Ray\'s head at $RAY_ADDRESS"\n'
        "  sleep 5\n"
        "done\n"
        f"ray job submit -- raypd serve --config {CONFIG_FILE} --detach\n"
    )
