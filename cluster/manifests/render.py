"""Rendering of ClusterConfig as Kubernetes objects, for `raypd manifests`. Pure."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.manifests.inference_pool import inference_pools
from cluster.manifests.inside import internal_certificates
from cluster.manifests.job import config_map, nccl_config_map, serve_job
from cluster.manifests.objects import Manifest, manifest
from cluster.manifests.pod_groups import settle
from cluster.manifests.ray_cluster import ray_cluster
from cluster.manifests.redis import redis_manifests
from cluster.manifests.services import disruption_budgets, network_policies, pod_monitors, services
from cluster.manifests.trial import trial_job
from cluster.routing.engine_connection import EngineRole
from cluster.settings.kubernetes import KubernetesConfig


def render(config: ClusterConfig) -> list[Manifest]:
    """Return all objects of a cluster, in the order in which they can be applied. Raises InvalidConfig."""
    config = settle(config)
    kubernetes = config.kubernetes
    image = image_of(config)
    return [
        _namespace(kubernetes),
        config_map(config),
        *([nccl_config_map(config)] if _has_gpus(config) else []),
        *redis_manifests(kubernetes),
        *internal_certificates(kubernetes),
        ray_cluster(config, image),
        *services(config),
        *disruption_budgets(config),
        *network_policies(config),
        *pod_monitors(config),
        *inference_pools(config),
        serve_job(config, image),
    ]


def render_trial(config: ClusterConfig) -> list[Manifest]:
    """Return a RayJob that runs `raypd demo` on such a cluster, and the objects that it needs. Raises InvalidConfig."""
    config = settle(config)
    trial = [_namespace(config.kubernetes), config_map(config), *internal_certificates(config.kubernetes)]
    if _has_gpus(config):
        trial.append(nccl_config_map(config))
    return [*trial, trial_job(config, image_of(config))]


def image_of(config: ClusterConfig) -> str:
    """Return the image of every container that runs raypd or Ray."""
    return config.kubernetes.image or KubernetesConfig.default_image(has_gpus=_has_gpus(config))


def _has_gpus(config: ClusterConfig) -> bool:
    return any(config.group(role).count and config.group(role).num_gpus for role in EngineRole)


def _namespace(kubernetes: KubernetesConfig) -> Manifest:
    namespace = manifest("v1", "Namespace", kubernetes.namespace, kubernetes)
    metadata = namespace["metadata"]
    assert isinstance(metadata, dict)
    labels = metadata["labels"]
    assert isinstance(labels, dict)
    # RDMA needs IPC_LOCK, which neither the restricted nor the baseline standard allows.
    labels["pod-security.kubernetes.io/enforce"] = "privileged" if kubernetes.rdma is not None else "restricted"
    return namespace
