"""The groups of pods with their resources, and the cluster's settings as they are inside Kubernetes.

A pod of an engine group offers Ray exactly the resources that one engine reserves
(cluster/pool/engines/engine_placement.py), so it runs one engine with all of its tensor-parallel ranks. A pod of the
ingress group offers one unit of a custom resource, so it runs one ingress. Every group has its role as a Ray label; the
settings inside Kubernetes use these labels to place engines and the controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.access.server_tls import TlsConfig
from cluster.config import ClusterConfig, EngineGroupConfig
from cluster.errors import InvalidConfig
from cluster.manifests.inside import inside_settings
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.settings.kubernetes import GPU, KubernetesConfig, PodConfig

ROLE_LABEL: Final = "raypd.io/role"
HEAD: Final = "head"
INGRESS: Final = "ingress"
INGRESS_RESOURCE: Final = "raypd_ingress"
CONFIG_DIRECTORY: Final = "/etc/raypd"
CONFIG_FILE: Final = f"{CONFIG_DIRECTORY}/cluster.yaml"
TLS_DIRECTORY: Final = "/etc/raypd-tls"
TOKENS_DIRECTORY: Final = "/etc/raypd-tokens"
TOKENS_FILE: Final = "tokens.yaml"
OPERATOR_FILE: Final = "operator"

_PLACE_TIMEOUT_S: Final = 900.0
"""The default of place_timeout_s in pods, which first pull an image of several GB, or wait for new machines."""
_START_TIMEOUT_S: Final = 2400.0
_ADMIN_PORT_DISTANCE: Final = 100
"""The distance from the gRPC port to the default admin port: more than the number of ingresses, whose ports follow each
other.
"""
_GIB: Final = 2**30
_OBJECT_STORE_GIB: Final = 0.25
"""The size of Ray's object store, which raypd does not use for its data."""
_NCCL_SHM_GIB: Final = 2.0
_PROCESS_GIB: Final = 2.0
"""The memory of Ray's own processes, or of one of raypd's with torch."""
_CPU_ENGINE_GIB: Final = 4.0
"""The memory for a small model's weights and activations."""
_GPU_ENGINE_GIB: Final = 96.0
"""The host memory of a rank on a GPU: its weights while they are loaded, CUDA's own needs, grammar compilers."""


@dataclass(frozen=True, slots=True)
class PodGroup:
    """A group of equal pods.

    ray_resources: the resources that each pod offers to Ray
    num_pods:      number of pods at the start
    settings:      the settings kubernetes.NAME of the group
    gpu:           the kind of the GPUs; None for any, or without GPUs
    """

    name: str
    ray_resources: Mapping[str, float]
    num_pods: int
    settings: PodConfig
    memory_gib: float
    shm_gib: float
    gpu: GPU | None = None

    @property
    def num_cpus(self) -> float:
        """The number of CPUs that each pod requests of Kubernetes."""
        return self.ray_resources["CPU"] + self.settings.extra_cpus

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of each pod."""
        return int(self.ray_resources.get("GPU", 0))

    @property
    def min_pods(self) -> int:
        """The least number of pods that the autoscaler keeps."""
        return self.num_pods if self.settings.min_pods is None else self.settings.min_pods

    @property
    def max_pods(self) -> int:
        """The largest number of pods that the autoscaler starts."""
        return max(self.num_pods, self.min_pods) if self.settings.max_pods is None else self.settings.max_pods


def settle(config: ClusterConfig) -> ClusterConfig:
    """Return the settings with which a cluster runs inside Kubernetes. Raises InvalidConfig.

    config: the operator's settings, to which host, ports, labels, files of Secrets and timeouts are added
    """
    for name, port in (client_ports(config) | admin_ports(config)).items():
        if port == 0:
            setting = {"grpc": "ingress.port", "admin": "ingress.admin_port"}.get(name, f"ingress.{name}.port")
            raise InvalidConfig("kubernetes", [f"{setting} = 0: a Service needs a fixed port; give a number"])
    if config.ray.address is not None:
        raise InvalidConfig("kubernetes", ["ray.address: the manifests include a Ray cluster; leave this setting out"])
    if config.ingress.tls is not None or config.ingress.tokens is not None:
        raise InvalidConfig(
            "kubernetes",
            ["ingress.tls and ingress.tokens: here the files come from Secrets; set kubernetes.tls, kubernetes.tokens"],
        )
    models = config.kubernetes.models
    if models is not None and not Path(config.model.model).is_relative_to(models.mount_path):
        raise InvalidConfig(
            "kubernetes",
            [f"model.model = {config.model.model}: it is not below kubernetes.models.mount_path, {models.mount_path}"],
        )
    updates: dict[str, Any] = {
        **inside_settings(config),
        "ingress": _ingress(config),
        "controller": config.controller.model_copy(
            # The controller has to survive the head's death, so it does not run on the head.
            update={"labels": {ROLE_LABEL: f"!{HEAD}", **config.controller.labels}}
        ),
    }
    for role in EngineRole:
        group = config.group(role)
        if group.count == 0:
            continue
        updates[role.value] = group.model_copy(update={"labels": {ROLE_LABEL: role.value, **group.labels}})
    if "place_timeout_s" not in config.model_fields_set:
        updates["place_timeout_s"] = _PLACE_TIMEOUT_S
    if "start_timeout_s" not in config.model_fields_set:
        updates["start_timeout_s"] = _START_TIMEOUT_S
    return config.model_copy(update=updates)


def client_ports(config: ClusterConfig) -> dict[str, int]:
    """Return the ports of an ingress for clients, by name."""
    ports = {"grpc": config.ingress.port}
    if config.ingress.http is not None:
        ports["http"] = config.ingress.http.port
    return ports


def admin_ports(config: ClusterConfig) -> dict[str, int]:
    """Return the ports of an ingress for operators only, by name; none if AdminService shares the clients' port.

    By default AdminService has its own port, since every pod in Kubernetes may reach the clients' ports. Only an
    explicit `admin_port: null` lets it share the clients' port.
    """
    ingress = config.ingress
    if ingress.admin_port is not None:
        return {"admin": ingress.admin_port}
    if "admin_port" in ingress.model_fields_set:
        return {}
    return {"admin": ingress.port + _ADMIN_PORT_DISTANCE}


def _ingress(config: ClusterConfig) -> IngressConfig:
    kubernetes = config.kubernetes
    updates: dict[str, Any] = {
        "host": "0.0.0.0",
        # Every pod of the group gets an ingress, also one that the autoscaler or `kubectl scale` has added.
        "per_node": True,
        "resources": {**config.ingress.resources, INGRESS_RESOURCE: 1.0},
    }
    if admin := admin_ports(config):
        updates["admin_port"] = admin["admin"]
    if kubernetes.tls is None:
        # Without TLS, the ingresses are protected by the NetworkPolicies only (docs/security.md).
        updates["insecure"] = True
    else:
        client_ca = f"{TLS_DIRECTORY}/ca.crt" if kubernetes.tls.mutual else None
        certificate, key = f"{TLS_DIRECTORY}/tls.crt", f"{TLS_DIRECTORY}/tls.key"
        updates["tls"] = TlsConfig.model_validate({"certificate": certificate, "key": key, "client_ca": client_ca})
    if kubernetes.tokens is not None:
        updates["tokens"] = Path(TOKENS_DIRECTORY) / TOKENS_FILE
    return config.ingress.model_copy(update=updates)


def config_file(config: ClusterConfig) -> str:
    """Return the settings file that `raypd serve` reads in the cluster. config: the result of settle()

    Settings that were not given are left out, since their defaults may depend on the image, as the demo model's path.
    """
    settings = config.model_dump(mode="json", exclude_unset=True, exclude={"kubernetes", "ray"})
    return yaml.safe_dump(settings, sort_keys=False)


def head_group(kubernetes: KubernetesConfig) -> PodGroup:
    """Return the group of Ray's head, on which no engine, ingress or controller runs."""
    memory_gib = kubernetes.head.memory_gib or 2 * _PROCESS_GIB
    return PodGroup(HEAD, {"CPU": 0}, 1, kubernetes.head, memory_gib, kubernetes.head.shm_gib or 2 * _OBJECT_STORE_GIB)


def worker_groups(config: ClusterConfig) -> list[PodGroup]:
    """Return the ingress group and one group for each role with engines. Raises InvalidConfig."""
    kubernetes = config.kubernetes
    pods = kubernetes.ingress
    ingress = PodGroup(
        INGRESS,
        {"CPU": 0, INGRESS_RESOURCE: 1},
        config.ingress.count,
        pods,
        pods.memory_gib or 2 * _PROCESS_GIB,
        pods.shm_gib or 2 * _OBJECT_STORE_GIB,
    )
    mistakes: list[str] = []
    groups = [ingress]
    for role in EngineRole:
        if config.group(role).count == 0:
            continue
        groups.append(_engine_group(config, role, mistakes))
    for group in (head_group(kubernetes), *groups):
        if group.min_pods > group.max_pods:
            mistakes.append(
                f"{group.name}: min_pods is {group.min_pods} and max_pods is {group.max_pods}: the first is larger"
            )
        if group.shm_gib >= group.memory_gib:
            mistakes.append(f"{group.name}.shm_gib = {group.shm_gib:g}: it is part of memory_gib, {group.memory_gib:g}")
    if mistakes:
        raise InvalidConfig("kubernetes", mistakes)
    return groups


def _engine_group(config: ClusterConfig, role: EngineRole, mistakes: list[str]) -> PodGroup:
    group, pods = config.group(role), _pods_of(config.kubernetes, role)
    num_ranks = config.num_ranks(role)
    num_cpus, num_gpus = group.num_cpus * num_ranks, group.num_gpus * num_ranks
    # KubeRay rounds CPUs up to whole ones.
    resources: dict[str, float] = {"CPU": math.ceil(num_cpus)}
    if num_gpus != int(num_gpus):
        mistakes.append(
            f"{role.value}.num_gpus = {group.num_gpus:g}: a pod holds one engine, and whole GPUs; give each rank 1"
        )
    elif num_gpus:
        resources["GPU"] = int(num_gpus)
    elif num_cpus != int(num_cpus) or not num_cpus:
        mistakes.append(
            f"{role.value}.num_cpus = {group.num_cpus:g}: a pod holds one engine, and whole CPUs; give each rank 1"
        )
    resources |= {name: amount * num_ranks for name, amount in group.resources.items()}
    shm_gib = pods.shm_gib or 2 * _OBJECT_STORE_GIB + (_NCCL_SHM_GIB * num_ranks if num_gpus else 0)
    memory_gib = pods.memory_gib or _engine_memory_gib(config, role, group) + shm_gib
    gpu = (pods.gpu or config.kubernetes.gpu) if num_gpus else None
    return PodGroup(role.value, resources, group.count, pods, memory_gib, shm_gib, gpu)


def _pods_of(kubernetes: KubernetesConfig, role: EngineRole) -> PodConfig:
    pods = {EngineRole.PREFILL: kubernetes.prefill, EngineRole.DECODE: kubernetes.decode}
    pods |= {EngineRole.BOTH: kubernetes.both, EngineRole.ENCODE: kubernetes.encode}
    return pods[role]


def _engine_memory_gib(config: ClusterConfig, role: EngineRole, group: EngineGroupConfig) -> float:
    """Return the host memory for one engine in GiB.

    An engine without GPUs has its KV cache in host memory, in a memory file outside of /dev/shm.
    """
    engine, num_ranks = config.engine_config(role), config.num_ranks(role)
    memory_gib = _PROCESS_GIB * (1 + num_ranks) + engine.kv_transfer.cpu_cache_gib
    if group.num_gpus:
        return memory_gib + _GPU_ENGINE_GIB * num_ranks
    return memory_gib + (_CPU_ENGINE_GIB + (engine.cache.kv_cache_memory_gib or _CPU_ENGINE_GIB)) * num_ranks
