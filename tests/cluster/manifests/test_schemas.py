"""Every manifest is what Kubernetes and KubeRay take: their own schemas, with no field that they do not know."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it ships no types
import pytest

from tests.cluster.manifests.crd_schemas import CRDS, validator
from tests.cluster.manifests.deployments import everything, of_kind

_KUBERNETES = "1.33"
_OWN_SCHEMAS = {"ray.io/v1", "monitoring.coreos.com/v1", "cert-manager.io/v1", "inference.networking.k8s.io/v1"}

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's CRDs are not beside this repository, in ../shared/reference/crds"
)


@pytest.fixture(scope="module", autouse=True)
def definitions_read_once() -> Iterator[None]:
    """kubernetes-validate reads all of Kubernetes' definitions anew for every object."""
    utils = kubernetes_validate.utils
    read: Callable[..., Any] = utils.schema_contents
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(read))
        yield


def test_kubernetes_own_objects_pass_its_schemas() -> None:
    checked = set()
    for one in everything():
        text = json.dumps(one, sort_keys=True)
        if one["apiVersion"] in _OWN_SCHEMAS or text in checked:
            continue
        checked.add(text)
        kubernetes_validate.validate(one, _KUBERNETES, strict=True)
    kinds = {json.loads(text)["kind"] for text in checked}
    assert kinds == {"Namespace", "ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Job"}


def test_the_pods_in_a_ray_cluster_pass_kubernetes_schema() -> None:
    for cluster in [one for one in everything() if one["kind"] == "RayCluster"]:
        spec: Any = cluster["spec"]
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, _KUBERNETES, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_noticed() -> None:
    budget = copy.deepcopy(next(one for one in everything() if one["kind"] == "PodDisruptionBudget"))
    assert isinstance(budget["spec"], dict)
    budget["spec"]["minAvailabel"] = 1

    with pytest.raises(kubernetes_validate.ValidationError, match="minAvailabel"):
        kubernetes_validate.validate(budget, _KUBERNETES, strict=True)


@needs_crds
@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_ray_objects_pass_kuberays_schemas(kind: str) -> None:
    check = validator(kind)
    objects = [one for one in everything() if one["kind"] == kind]

    assert objects
    assert [error.message for one in objects for error in check.iter_errors(one)] == []


@needs_crds
def test_a_field_that_kuberay_does_not_know_is_noticed() -> None:
    cluster = copy.deepcopy(of_kind([one for one in everything() if one["kind"] == "RayCluster"][:1], "RayCluster"))
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3

    [error] = validator("RayCluster").iter_errors(cluster)
    assert "maxReplica" in error.message
