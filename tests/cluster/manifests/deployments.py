"""The files of deploy/kuberay/, as settings and as rendered objects."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

from cluster.config import ClusterConfig, load_cluster_config
from cluster.manifests.objects import Manifest
from cluster.manifests.render import render, render_trial

KUBERAY: Final = Path(__file__).parents[3] / "deploy" / "kuberay"
OVERLAYS: Final = ("cpu-demo", "gateway-inference", "gpu-1p1d", "gpu-xpyd-tp", "rdma")


@cache
def settings(overlay: str) -> ClusterConfig:
    return load_cluster_config(KUBERAY / "overlays" / overlay / "raypd.yaml", {}, looks_at_model=False)


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    return tuple(render(settings(overlay)))


def everything() -> list[Manifest]:
    """The objects of all overlays, and of the trial."""
    objects = [one for overlay in OVERLAYS for one in rendered(overlay)]
    return [*objects, *render_trial(settings("cpu-demo"))]


def of_kind(objects: Any, kind: str, name: str | None = None) -> Any:  # parsed YAML
    """The one object of that kind, or of that kind and name."""
    [found] = [one for one in objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    return found


def worker_groups(objects: Any) -> dict[str, Any]:
    """Return the worker groups of the RayCluster among these objects, by name."""
    return {group["groupName"]: group for group in of_kind(objects, "RayCluster")["spec"]["workerGroupSpecs"]}
