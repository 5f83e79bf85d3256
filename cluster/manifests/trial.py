"""The RayJob that tries a cluster out."""

from __future__ import annotations

from typing import Final

from cluster.config import ClusterConfig
from cluster.manifests.job import submitter_pod
from cluster.manifests.objects import Manifest, manifest
from cluster.manifests.pod_groups import CONFIG_FILE
from cluster.manifests.ray_cluster import ray_cluster_spec
from cluster.parameters.json_types import JSON

_KEPT_S: Final = 600
_DEADLINE_S: Final = 1800


def trial_job(config: ClusterConfig, image: str) -> Manifest:
    """Render a RayJob that starts its own Ray cluster, runs `raypd demo` on it, and removes the cluster afterwards.

    KubeRay submits the job once every pod is ready, so no pod may have a readiness probe that only the job fulfils.
    """
    spec = ray_cluster_spec(config, image)
    for group in _as_list(spec["workerGroupSpecs"]):
        containers = _as_list(_as_object(_as_object(_as_object(group)["template"])["spec"])["containers"])
        for container in containers:
            _as_object(container).pop("readinessProbe", None)
            # The cluster of a trial has no clients, so its pods need no drain.
            _as_object(container).pop("lifecycle", None)
    kubernetes = config.kubernetes
    return manifest(
        "ray.io/v1",
        "RayJob",
        f"{kubernetes.name}-trial",
        kubernetes,
        spec={
            "entrypoint": f"raypd demo --config {CONFIG_FILE}",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_S,
            "activeDeadlineSeconds": _DEADLINE_S,
            # KubeRay's default pod is refused under the restricted standard. KubeRay adds the command to this one.
            "submitterPodTemplate": {"spec": submitter_pod(config, image)},
            "rayClusterSpec": spec,
        },
    )


def _as_object(value: JSON) -> Manifest:
    assert isinstance(value, dict)
    return value


def _as_list(value: JSON) -> list[JSON]:
    assert isinstance(value, list)
    return value
