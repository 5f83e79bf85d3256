"""The RayCluster object."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cluster.config import ClusterConfig
from cluster.manifests.inference_pool import labels_of_group
from cluster.manifests.objects import Manifest, common_labels, container_security, manifest, quantity
from cluster.manifests.pod_groups import ROLE_LABEL, PodGroup, head_group, worker_groups
from cluster.manifests.pods import head_template, worker_template
from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import RAY_VERSION, KubernetesConfig

REDIS_PASSWORD_KEY: Final = "password"

_API: Final = "ray.io/v1"
_OBJECT_STORE_BYTES: Final = 256 * 2**20
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


def ray_cluster(config: ClusterConfig, image: str) -> Manifest:
    """Render the RayCluster. Raises InvalidConfig."""
    spec = ray_cluster_spec(config, image)
    kubernetes = config.kubernetes
    if kubernetes.redis is not None:
        password: Manifest = {"secretKeyRef": {"name": kubernetes.redis.secret, "key": REDIS_PASSWORD_KEY}}
        spec["gcsFaultToleranceOptions"] = {
            "redisAddress": redis_address(kubernetes),
            "redisPassword": {"valueFrom": password},
            # A fixed name, so that a RayCluster that is created again finds its earlier state.
            "externalStorageNamespace": kubernetes.name,
        }
    return manifest(_API, "RayCluster", kubernetes.name, kubernetes, spec=spec)


def redis_address(kubernetes: KubernetesConfig) -> str:
    """Return host:port of the Redis server where Ray keeps its state; kubernetes.redis has to be set."""
    assert kubernetes.redis is not None
    return kubernetes.redis.address or f"{kubernetes.name}-redis.{kubernetes.namespace}.svc:6379"


def ray_cluster_spec(config: ClusterConfig, image: str) -> Manifest:
    """Return the part of the RayCluster's spec that the trial RayJob shares, without Redis. Raises InvalidConfig."""
    kubernetes = config.kubernetes
    head = head_group(kubernetes)
    spec: Manifest = {
        "rayVersion": RAY_VERSION,
        # The mode is set explicitly, since Ray's default differs between head and workers.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": _ray_start_params(),
            **_offered(head),
            "template": _with_labels(kubernetes, head_template(config, image, head)),
        },
        "workerGroupSpecs": [_worker_group(config, image, group) for group in worker_groups(config)],
    }
    if kubernetes.autoscaling:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": kubernetes.idle_timeout_s,
            "securityContext": {**container_security(), "readOnlyRootFilesystem": False},
        }
    return spec


def _worker_group(config: ClusterConfig, image: str, group: PodGroup) -> Manifest:
    return {
        "groupName": group.name,
        "replicas": group.num_pods,
        "minReplicas": group.min_pods,
        "maxReplicas": group.max_pods,
        "rayStartParams": _ray_start_params(),
        **_offered(group),
        "template": _with_labels(
            config.kubernetes, worker_template(config, image, group), labels_of_group(config, group.name)
        ),
    }


def _ray_start_params() -> Manifest:
    # Parameters such as num-cpus are left out: KubeRay refuses them together with a group's resources.
    return {"object-store-memory": str(_OBJECT_STORE_BYTES)}


def _offered(group: PodGroup) -> Manifest:
    """Return the Ray labels and Ray resources of each node of a group."""
    resources: dict[str, JSON] = {name: quantity(amount) for name, amount in group.ray_resources.items()}
    return {"labels": {ROLE_LABEL: group.name}, "resources": resources}


def _with_labels(kubernetes: KubernetesConfig, template: Manifest, further: Mapping[str, str] = _NO_LABELS) -> Manifest:
    metadata = template["metadata"]
    assert isinstance(metadata, dict)
    metadata["labels"] = {**common_labels(kubernetes), **further}
    return template
