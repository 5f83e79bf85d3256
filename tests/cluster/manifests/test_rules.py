"""Objects that KubeRay's operator refuses though its schemas allow them, or that break a cluster unrefused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cluster.manifests.render import render_trial
from cluster.manifests.rules import find_mistakes
from tests.cluster.manifests.deployments import OVERLAYS, everything, of_kind, rendered, settings


def test_nothing_is_wrong_with_what_is_deployed() -> None:
    assert find_mistakes(everything()) == []


def _head(cluster: Any) -> Any:
    return cluster["spec"]["headGroupSpec"]


def _head_container(cluster: Any) -> Any:
    return _head(cluster)["template"]["spec"]["containers"][0]


def _group(cluster: Any) -> Any:
    return cluster["spec"]["workerGroupSpecs"][0]


def _set_variable(name: str, value: str) -> Callable[[Any], None]:
    return lambda cluster: _head_container(cluster)["env"].append({"name": name, "value": value})


def _change(place: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    """A value of None takes the field away."""

    def change(cluster: Any) -> None:
        for name, value in values.items():
            if value is None:
                place(cluster).pop(name, None)
            else:
                place(cluster)[name] = value

    return change


def _both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(cluster: Any) -> None:
        for one in changes:
            one(cluster)

    return change


_NO_AUTOSCALER = _change(lambda c: c["spec"], enableInTreeAutoscaling=None, autoscalerOptions=None)
_V1 = _change(lambda c: c["spec"]["autoscalerOptions"], version="v1")

_REFUSED = {
    "name too long": (_change(lambda c: c["metadata"], name="a" * 54), "54 characters; 53 are allowed"),
    "name not DNS": (_change(lambda c: c["metadata"], name="Raypd"), "begin with a letter"),
    "no head container": (_change(lambda c: _head(c)["template"]["spec"], containers=[]), "head: it has no container"),
    "resources twice": (
        _change(lambda c: _group(c)["rayStartParams"], **{"num-cpus": "4"}),
        "ingress: resources are set, and in rayStartParams num-cpus too",
    ),
    "labels as start parameter": (
        _change(lambda c: _group(c)["rayStartParams"], labels="a=b"),
        "rayStartParams.labels is not supported",
    ),
    "label name": (_change(lambda c: _group(c)["labels"], **{"a/b/c": "d"}), "'a/b/c' is not a label's name"),
    "label value": (_change(lambda c: _group(c)["labels"], role="a b"), "'a b' is not a label's value"),
    "no maximum without autoscaler": (
        _both(_NO_AUTOSCALER, _change(_group, maxReplicas=None)),
        "must both be set when autoscaling is off",
    ),
    "negative minimum": (_change(_group, minReplicas=-1), "minReplicas is -1"),
    "minimum beyond maximum": (_change(_group, minReplicas=9), "minReplicas is 9, more than maxReplicas, 3"),
    "negative idle timeout": (
        _change(lambda c: c["spec"]["autoscalerOptions"], idleTimeoutSeconds=-1),
        "autoscalerOptions.idleTimeoutSeconds is -1",
    ),
    "group's idle timeout without v2": (
        _both(_V1, _change(_group, idleTimeoutSeconds=5)),
        "idleTimeoutSeconds needs autoscalerOptions.version v2",
    ),
    "priority without v2": (_both(_V1, _change(_group, priority=1)), "priority needs autoscalerOptions.version v2"),
    "priority of an old Ray": (
        _both(_change(lambda c: c["spec"], rayVersion="2.55.1"), _change(_group, priority=1)),
        "priority needs rayVersion 2.56.0",
    ),
    "restart policy": (
        _change(lambda c: _head(c)["template"]["spec"], restartPolicy="Always"),
        "head: restartPolicy must be Never",
    ),
    "autoscaler version twice": (_set_variable("RAY_enable_autoscaler_v2", "1"), "are both set; use only the first"),
    "autoscaler by variable only": (
        _both(_NO_AUTOSCALER, _set_variable("RAY_enable_autoscaler_v2", "true")),
        "but enableInTreeAutoscaling is not",
    ),
    "autoscaler's command": (
        _change(lambda c: c["spec"]["autoscalerOptions"], env=[{"name": "KUBERAY_GEN_AUTOSCALER_START_CMD"}]),
        "must not set KUBERAY_GEN_AUTOSCALER_START_CMD",
    ),
    "Redis password twice": (_set_variable("REDIS_PASSWORD", "x"), "REDIS_PASSWORD of the head"),
    "Redis address twice": (_set_variable("RAY_REDIS_ADDRESS", "x"), "RAY_REDIS_ADDRESS of the head"),
    "Redis address alone": (
        _both(_change(lambda c: c["spec"], gcsFaultToleranceOptions=None), _set_variable("RAY_REDIS_ADDRESS", "x")),
        "RAY_REDIS_ADDRESS is set without gcsFaultToleranceOptions",
    ),
    "Redis user": (_set_variable("REDIS_USERNAME", "x"), "redisUsername only"),
    "Redis password as start parameter": (
        _change(lambda c: _head(c)["rayStartParams"], **{"redis-password": "x"}),
        "rayStartParams.redis-password",
    ),
    "fault tolerance by annotation too": (
        _change(lambda c: c["metadata"], annotations={"ray.io/ft-enabled": "true"}),
        "the annotation ray.io/ft-enabled",
    ),
    "storage with Redis": (
        _change(lambda c: c["spec"]["gcsFaultToleranceOptions"], storage={"size": "1Gi"}),
        "for the backend rocksdb only",
    ),
    "RocksDB": (
        _change(lambda c: c["spec"]["gcsFaultToleranceOptions"], backend="rocksdb"),
        "feature gate GCSFaultToleranceEmbeddedStorage",
    ),
    "token of an old Ray": (_change(lambda c: c["spec"], rayVersion="2.51.0"), "needs rayVersion 2.52.0 or later"),
    "token without a version": (_change(lambda c: c["spec"], rayVersion=None), "needs rayVersion 2.52.0 or later"),
    "Kubernetes tokens twice": (
        _change(lambda c: c["spec"]["authOptions"], enableK8sTokenAuth=True, secretName="s"),
        "are both set",
    ),
    "Kubernetes tokens without a mode": (
        _change(lambda c: c["spec"], authOptions={"enableK8sTokenAuth": True}),
        "needs mode token",
    ),
    "operator's network policy": (
        _change(lambda c: c["spec"], networkPolicy={}),
        "feature gate RayClusterNetworkPolicy",
    ),
    "operator's TLS": (_change(lambda c: c["spec"], tlsOptions={}), "feature gate RayClusterMTLS"),
    "suspended group": (_change(_group, suspend=True), "feature gate RayJobDeletionPolicy"),
    "application liveness probe": (
        _change(lambda c: _group(c)["template"]["spec"]["containers"][0], livenessProbe={"grpc": {"port": 50051}}),
        "a gRPC liveness probe kills pods",
    ),
    "grace shorter than the drain": (
        _change(lambda c: _group(c)["template"]["spec"], terminationGracePeriodSeconds=60),
        "terminationGracePeriodSeconds is 60; preStop drains for up to 330 s",
    ),
}


@pytest.mark.parametrize("change", _REFUSED)
def test_what_the_operator_refuses_is_found(change: str) -> None:
    cluster = copy.deepcopy(of_kind(rendered("gpu-xpyd-tp"), "RayCluster"))
    spoil, expected = _REFUSED[change]
    spoil(cluster)

    [mistake] = find_mistakes([cluster])

    assert mistake.startswith(f"RayCluster/{cluster['metadata']['name']}: ")
    assert expected in mistake


def test_a_ray_job_with_a_probe_that_it_would_have_to_satisfy_itself_is_found() -> None:
    job = copy.deepcopy(of_kind(render_trial(settings("cpu-demo")), "RayJob"))
    cluster = of_kind(rendered("cpu-demo"), "RayCluster")
    job["spec"]["rayClusterSpec"] = cluster["spec"]

    [mistake] = find_mistakes([job])

    assert "ingress: KubeRay submits a RayJob once every pod is ready" in mistake


def test_a_ray_job_needs_a_cluster_and_a_shorter_name() -> None:
    job = copy.deepcopy(of_kind(render_trial(settings("cpu-demo")), "RayJob"))
    job["metadata"]["name"] = "a" * 48
    empty = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {}}

    assert find_mistakes([job, empty]) == [
        f"RayJob/{'a' * 48}: its name has 48 characters; 47 are allowed",
        "RayJob/a: one of rayClusterSpec and clusterSelector must be set",
    ]


@pytest.mark.parametrize("budget", [{"maxUnavailable": 1}, {"minAvailable": "50%"}])
def test_a_budget_that_would_let_no_node_be_emptied_is_found(budget: dict[str, Any]) -> None:
    one = copy.deepcopy(of_kind(rendered("gpu-xpyd-tp"), "PodDisruptionBudget", "raypd-decode"))
    one["spec"] = budget | {"selector": one["spec"]["selector"]}

    [mistake] = find_mistakes([one])

    assert "a RayCluster has no scale subresource" in mistake


def test_budgets_of_other_pods_are_not_looked_at() -> None:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}

    assert (
        find_mistakes(
            [{"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"}, "spec": spec}]
        )
        == []
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_budget_lets_one_pod_go(overlay: str) -> None:
    groups = {
        group["groupName"]: group for group in of_kind(rendered(overlay), "RayCluster")["spec"]["workerGroupSpecs"]
    }
    for name, group in groups.items():
        budget = of_kind(rendered(overlay), "PodDisruptionBudget", f"raypd-{name}")
        assert budget["spec"]["minAvailable"] == group["replicas"] - 1
