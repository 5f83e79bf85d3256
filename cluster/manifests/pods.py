"""The pod templates of a RayCluster: for the head, for ingresses and for engines."""

from __future__ import annotations

import math
from typing import Final

from cluster.config import ClusterConfig
from cluster.manifests.inside import inside_mounts, inside_volumes
from cluster.manifests.objects import (
    DASHBOARD_PORT,
    METRICS_PORT,
    POD_SECURITY,
    RAY_CLUSTER_LABEL,
    RAY_GROUP_LABEL,
    Manifest,
    container_security,
    environment,
    quantity,
)
from cluster.manifests.pod_groups import CONFIG_DIRECTORY, HEAD, INGRESS, PodGroup, admin_ports, client_ports
from cluster.manifests.secret_files import credential_mounts, credential_variables, credential_volumes
from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import GPU_PRODUCTS, KubernetesConfig

NODE_IP_VARIABLE: Final = "RAYPD_NODE_IP"
DRAIN_SLACK_S: Final = 30
"""The time that a drain takes in addition to drain_timeout_s, for calls between processes and their ends."""
GRACE_SLACK_S: Final = 30
"""The time between the limit of the preStop hook and that of the pod, in which Ray ends."""

_RAY_VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray detects a dead node after 7 s instead of 65 s; docs/operations.md describes what depends on this.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Nodes and actors keep running for this time without the head.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # By default Ray gives its workers, and so the engines, a low priority (nice 15). Other processes of the pod, such
    # as `raypd drain` of the preStop hook or a `kubectl exec`, would slow them down.
    "RAY_worker_niceness": "0",
    "HOME": "/tmp",
}
_HEAD_PORTS: Final = {
    "gcs": 6379,
    "dashboard": DASHBOARD_PORT,
    "client": 10001,
    "metrics": METRICS_PORT,
    "as-metrics": 44217,
    "dash-metrics": 44227,
}


def head_template(config: ClusterConfig, image: str, group: PodGroup) -> Manifest:
    """Render the pod of Ray's head, which also runs `raypd serve --detach` once.

    The command reads the settings file and the checkpoint's files, so the head mounts both.
    """
    kubernetes = config.kubernetes
    container = _container("ray-head", config, image, group)
    container["ports"] = _ports(_HEAD_PORTS)
    spec = _spec(kubernetes, group, container)
    # With autoscaling, KubeRay gives the head the service account that the autoscaler needs.
    spec["automountServiceAccountToken"] = kubernetes.autoscaling
    return {"metadata": {"labels": {}}, "spec": spec}


def worker_template(config: ClusterConfig, image: str, group: PodGroup) -> Manifest:
    """Render the pod of an ingress or an engine.

    Only ingresses have a readiness probe of raypd, which succeeds when the cluster serves; nothing may wait for it
    before raypd is started. There is no liveness probe of raypd: the controller replaces processes that are stuck, and
    the pod stays.
    """
    kubernetes = config.kubernetes
    container = _container("ray-worker", config, image, group)
    ports = {"metrics": METRICS_PORT}
    if group.name == INGRESS:
        ports = client_ports(config) | admin_ports(config) | ports
        # Kubernetes' gRPC probe does not support TLS. The TCP port is open while the ingress serves or drains.
        kind = "grpc" if kubernetes.tls is None else "tcpSocket"
        container["readinessProbe"] = {
            kind: {"port": config.ingress.port},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        }
    container["ports"] = _ports(ports)
    container["lifecycle"] = {"preStop": {"exec": {"command": drain_command(config)}}}
    if group.num_gpus:
        container["envFrom"] = [{"configMapRef": {"name": f"{kubernetes.name}-nccl"}}]
    spec = _spec(kubernetes, group, container)
    spec["automountServiceAccountToken"] = False
    spec["terminationGracePeriodSeconds"] = grace_period_s(config)
    metadata: Manifest = {"labels": {}}
    if group.num_gpus and kubernetes.rdma is not None and kubernetes.rdma.network is not None:
        metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": kubernetes.rdma.network}
    return {"metadata": metadata, "spec": spec}


def admin_address(config: ClusterConfig) -> str:
    """Return the Service address, host:port, at which pods of the cluster reach AdminService."""
    kubernetes = config.kubernetes
    [(service, port)] = admin_ports(config).items() or {"grpc": config.ingress.port}.items()
    return f"{kubernetes.name}-{service}.{kubernetes.namespace}.svc:{port}"


def drain_command(config: ClusterConfig) -> list[JSON]:
    """Return the command of the preStop hook, which drains the pod's engine or ingress before the pod is stopped.

    The command fails at once if the cluster does not serve.
    """
    wait_s = math.ceil(config.drain_timeout_s) + DRAIN_SLACK_S
    command = f'raypd drain --node "${NODE_IP_VARIABLE}" --wait --wait-timeout {wait_s}'
    return ["/bin/sh", "-c", f"{command} --address {admin_address(config)}"]


def grace_period_s(config: ClusterConfig) -> int:
    """Return the termination grace period of pods, in seconds: for the preStop hook, and then the end of Ray."""
    return math.ceil(config.drain_timeout_s) + DRAIN_SLACK_S + GRACE_SLACK_S


def _container(name: str, config: ClusterConfig, image: str, group: PodGroup) -> Manifest:
    kubernetes = config.kubernetes
    memory = quantity(group.memory_gib, "Gi")
    limits: Manifest = {"memory": memory}
    if group.num_gpus:
        limits["nvidia.com/gpu"] = group.num_gpus
        if kubernetes.rdma is not None:
            limits[kubernetes.rdma.resource] = kubernetes.rdma.count
    has_rdma = bool(group.num_gpus) and kubernetes.rdma is not None
    variables = _RAY_VARIABLES | (credential_variables(kubernetes) if group.name != HEAD else {})
    container: Manifest = {
        "name": name,
        "image": image,
        "resources": {"requests": {"cpu": quantity(group.num_cpus), "memory": memory}, "limits": limits},
        "env": [
            {"name": NODE_IP_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *environment(variables),
        ],
        # RDMA locks its buffers in memory.
        "securityContext": container_security(*(["IPC_LOCK"] if has_rdma else [])),
        "volumeMounts": [],
    }
    _mount(container, "shm", "/dev/shm", is_read_only=False)
    _mount(container, "tmp", "/tmp", is_read_only=False)
    if group.name == HEAD:
        _mount(container, "config", CONFIG_DIRECTORY)
    if kubernetes.models is not None:
        _mount(container, "models", kubernetes.models.mount_path)
    mounts = container["volumeMounts"]
    assert isinstance(mounts, list)
    mounts += inside_mounts(kubernetes)
    if group.name != HEAD:
        mounts += credential_mounts(kubernetes)
    return container


def _mount(container: Manifest, volume: str, path: str, *, is_read_only: bool = True) -> None:
    mounts = container["volumeMounts"]
    assert isinstance(mounts, list)
    mount: Manifest = {"name": volume, "mountPath": path}
    if is_read_only:
        mount["readOnly"] = True
    mounts.append(mount)


def _volumes(kubernetes: KubernetesConfig, group: PodGroup) -> list[JSON]:
    volumes: list[JSON] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(group.shm_gib, "Gi")}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if group.name == HEAD:
        volumes.append({"name": "config", "configMap": {"name": f"{kubernetes.name}-config"}})
    if kubernetes.models is not None:
        claim: Manifest = {"claimName": kubernetes.models.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    volumes += inside_volumes(kubernetes)
    if group.name != HEAD:
        volumes += credential_volumes(kubernetes, is_ingress=group.name == INGRESS)
    return volumes


def _spec(kubernetes: KubernetesConfig, group: PodGroup, container: Manifest) -> Manifest:
    volumes = _volumes(kubernetes, group)
    spec: Manifest = {"securityContext": dict(POD_SECURITY), "containers": [container], "volumes": volumes}
    if kubernetes.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": kubernetes.image_pull_secret}]
    selector: Manifest = dict(group.settings.node_selector)
    if group.gpu is not None:
        selector["nvidia.com/gpu.product"] = GPU_PRODUCTS[group.gpu]
    if selector:
        spec["nodeSelector"] = selector
    if tolerations := _tolerations(group):
        spec["tolerations"] = tolerations
    if group.name != HEAD:
        labels: Manifest = {RAY_CLUSTER_LABEL: kubernetes.name, RAY_GROUP_LABEL: group.name}
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ]
    return spec


def _tolerations(group: PodGroup) -> list[JSON]:
    tolerations: list[JSON] = []
    if group.num_gpus:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    for one in group.settings.tolerations:
        toleration: Manifest = {"key": one.key, "operator": "Exists", "effect": one.effect}
        if one.value is not None:
            toleration |= {"operator": "Equal", "value": one.value}
        tolerations.append(toleration)
    return tolerations


def _ports(ports: dict[str, int]) -> list[JSON]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]
