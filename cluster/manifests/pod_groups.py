"""The groups of pods and what they hold, by the cluster's settings as they are inside Kubernetes.

A pod of an engine's group offers Ray exactly what one engine reserves (cluster/pool/engines/engine_placement.py), so it
holds one engine with all of its tensor-parallel ranks. A pod of the ingress group offers one unit of a custom resource,
so it holds one ingress. Every group carries its role as a Ray label, which the settings of engines and controller ask
for.
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
"""Pods have to pull an image of several GB first, and an autoscaler has to find machines for them."""
_START_TIMEOUT_S: Final = 2400.0
_ADMIN_PORT_DISTANCE: Final = 100
"""From the clients' port to the operators': more than there can be ingresses, each of which may take the next one."""
_GIB: Final = 2**30
_OBJECT_STORE_GIB: Final = 0.25
"""Nothing of raypd goes through Ray's object store."""
_NCCL_SHM_GIB: Final = 2.0
_PROCESS_GIB: Final = 2.0
"""Ray's own processes and one of raypd's, with torch."""
_CPU_ENGINE_GIB: Final = 4.0
"""A small model's weights and activations."""
_GPU_ENGINE_GIB: Final = 96.0
"""A rank's weights pass through it; CUDA's own host memory; grammar compilers."""


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods that are alike.

    ray_resources: what each offers to Ray; num_pods: of the start; gpu: kind, if num_gpus is not 0
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
        """CPUs to request of Kubernetes."""
        return self.ray_resources["CPU"] + self.settings.extra_cpus

    @property
    def num_gpus(self) -> int:
        """GPUs of each pod."""
        return int(self.ray_resources.get("GPU", 0))

    @property
    def min_pods(self) -> int:
        """Never fewer."""
        return self.num_pods if self.settings.min_pods is None else self.settings.min_pods

    @property
    def max_pods(self) -> int:
        """Never more."""
        return max(self.num_pods, self.min_pods) if self.settings.max_pods is None else self.settings.max_pods


def settle(config: ClusterConfig) -> ClusterConfig:
    """The settings that this cluster runs with in Kubernetes. Raises InvalidConfig."""
    for name, port in (client_ports(config) | admin_ports(config)).items():
        if port == 0:
            setting = {"grpc": "ingress.port", "admin": "ingress.admin_port"}.get(name, f"ingress.{name}.port")
            raise InvalidConfig("kubernetes", [f"{setting} = 0: Services need to know the port; give it a number"])
    if config.ray.address is not None:
        raise InvalidConfig("kubernetes", ["ray.address: the manifests bring a Ray cluster of their own; leave it out"])
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
            # Not on the head, which it is to outlive.
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
    """Return each ingress's ports for clients, by name."""
    ports = {"grpc": config.ingress.port}
    if config.ingress.http is not None:
        ports["http"] = config.ingress.http.port
    return ports


def admin_ports(config: ClusterConfig) -> dict[str, int]:
    """Return each ingress's ports for operators only, by name; none if AdminService shares the clients' port.

    AdminService has a port of its own, unless the settings say otherwise in so many words (`admin_port: null`): every
    pod of Kubernetes may reach the clients' ports.
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
        # A pod more is an ingress more, whoever wanted the pod.
        "per_node": True,
        "resources": {**config.ingress.resources, INGRESS_RESOURCE: 1.0},
    }
    if admin := admin_ports(config):
        updates["admin_port"] = admin["admin"]
    if kubernetes.tls is None:
        # Within the cluster's network, which its policies are to guard, unless there is TLS (docs/security.md).
        updates["insecure"] = True
    else:
        client_ca = f"{TLS_DIRECTORY}/ca.crt" if kubernetes.tls.mutual else None
        certificate, key = f"{TLS_DIRECTORY}/tls.crt", f"{TLS_DIRECTORY}/tls.key"
        updates["tls"] = TlsConfig.model_validate({"certificate": certificate, "key": key, "client_ca": client_ca})
    if kubernetes.tokens is not None:
        updates["tokens"] = Path(TOKENS_DIRECTORY) / TOKENS_FILE
    return config.ingress.model_copy(update=updates)


def config_file(config: ClusterConfig) -> str:
    """The text of the file that `raypd serve` reads in the cluster; settle() has been called.

    Only what was set: the demo model, for one, is wherever the image has it.
    """
    settings = config.model_dump(mode="json", exclude_unset=True, exclude={"kubernetes", "ray"})
    return yaml.safe_dump(settings, sort_keys=False)


def head_group(kubernetes: KubernetesConfig) -> PodGroup:
    """Ray's head: no engine, no ingress, no controller."""
    memory_gib = kubernetes.head.memory_gib or 2 * _PROCESS_GIB
    return PodGroup(HEAD, {"CPU": 0}, 1, kubernetes.head, memory_gib, kubernetes.head.shm_gib or 2 * _OBJECT_STORE_GIB)


def worker_groups(config: ClusterConfig) -> list[PodGroup]:
    """The ingress group first, then one for each role that there are engines of. Raises InvalidConfig."""
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
    # KubeRay rounds CPUs up.
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
    """Host memory for one engine. On the CPU its KV cache is in it: a memory file, which is not in /dev/shm."""
    engine, num_ranks = config.engine_config(role), config.num_ranks(role)
    memory_gib = _PROCESS_GIB * (1 + num_ranks) + engine.kv_transfer.cpu_cache_gib
    if group.num_gpus:
        return memory_gib + _GPU_ENGINE_GIB * num_ranks
    return memory_gib + (_CPU_ENGINE_GIB + (engine.cache.kv_cache_memory_gib or _CPU_ENGINE_GIB)) * num_ranks
