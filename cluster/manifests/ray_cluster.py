"""The RayCluster, and the RayJob that tries one out."""

from __future__ import annotations

from typing import Final

from cluster.config import ClusterConfig
from cluster.json_types import JSON
from cluster.manifests.objects import Manifest, common_labels, container_security, manifest, quantity
from cluster.manifests.placement import CONFIG_FILE, ROLE_LABEL, PodGroup, head_group, worker_groups
from cluster.manifests.pods import head_template, worker_template
from cluster.manifests.settings import RAY_VERSION, KubernetesConfig

REDIS_PASSWORD_KEY: Final = "password"

_API: Final = "ray.io/v1"
_OBJECT_STORE_BYTES: Final = 256 * 2**20
_KEPT_AFTER_TRIAL_S: Final = 600
_TRIAL_DEADLINE_S: Final = 1800


def ray_cluster(config: ClusterConfig, image: str) -> Manifest:
    """What serves. Raises InvalidConfig."""
    spec = _spec(config, image)
    kubernetes = config.kubernetes
    if kubernetes.redis is not None:
        password: Manifest = {"secretKeyRef": {"name": kubernetes.redis.secret, "key": REDIS_PASSWORD_KEY}}
        spec["gcsFaultToleranceOptions"] = {
            "redisAddress": redis_address(kubernetes),
            "redisPassword": {"valueFrom": password},
            # The same after the RayCluster was made anew: what it knew is found again, or swept.
            "externalStorageNamespace": kubernetes.name,
        }
    return manifest(_API, "RayCluster", kubernetes.name, kubernetes, spec=spec)


def trial_job(config: ClusterConfig, image: str) -> Manifest:
    """A RayJob with a cluster of its own that runs `raypd demo`, and is gone when it has ended.

    KubeRay submits it once every pod is ready: so no pod of it may have a probe that the job itself would satisfy.
    """
    spec = _spec(config, image)
    for group in _as_list(spec["workerGroupSpecs"]):
        containers = _as_list(_as_object(_as_object(_as_object(group)["template"])["spec"])["containers"])
        for container in containers:
            _as_object(container).pop("readinessProbe", None)
            # Nobody is served by it.
            _as_object(container).pop("lifecycle", None)
    kubernetes = config.kubernetes
    return manifest(
        _API,
        "RayJob",
        f"{kubernetes.name}-trial",
        kubernetes,
        spec={
            "entrypoint": f"raypd demo --config {CONFIG_FILE}",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_AFTER_TRIAL_S,
            "activeDeadlineSeconds": _TRIAL_DEADLINE_S,
            "rayClusterSpec": spec,
        },
    )


def redis_address(kubernetes: KubernetesConfig) -> str:
    """Where Ray keeps its state; kubernetes.redis is set."""
    assert kubernetes.redis is not None
    return kubernetes.redis.address or f"{kubernetes.name}-redis.{kubernetes.namespace}.svc:6379"


def _spec(config: ClusterConfig, image: str) -> Manifest:
    kubernetes = config.kubernetes
    head = head_group(kubernetes)
    spec: Manifest = {
        "rayVersion": RAY_VERSION,
        # Set, and not left to Ray: its default differs between head and workers.
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
        "template": _with_labels(config.kubernetes, worker_template(config, image, group)),
    }


def _ray_start_params() -> Manifest:
    # No num-cpus and the like: KubeRay refuses them beside a group's resources.
    return {"object-store-memory": str(_OBJECT_STORE_BYTES)}


def _offered(group: PodGroup) -> Manifest:
    """What Ray knows each node of the group by."""
    resources: dict[str, JSON] = {name: quantity(amount) for name, amount in group.ray_resources.items()}
    return {"labels": {ROLE_LABEL: group.name}, "resources": resources}


def _with_labels(kubernetes: KubernetesConfig, template: Manifest) -> Manifest:
    _as_object(template["metadata"])["labels"] = dict(common_labels(kubernetes))
    return template


def _as_object(value: JSON) -> Manifest:
    assert isinstance(value, dict)
    return value


def _as_list(value: JSON) -> list[JSON]:
    assert isinstance(value, list)
    return value
