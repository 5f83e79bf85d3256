"""Rules that schemas cannot express: what KubeRay's operator refuses, and what it accepts but breaks raypd.

The first half follows ValidateRayClusterMetadata, ValidateRayClusterSpec and ValidateRayJobMetadata of KubeRay v1.7.0
(ray-operator/controllers/ray/utils/validation.go).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

_MAX_CLUSTER_NAME: Final = 53
_MAX_JOB_NAME: Final = _MAX_CLUSTER_NAME - 6
_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RESOURCE_PARAMS: Final = ("num-cpus", "num-gpus", "memory", "resources")
_REDIS_VARIABLES: Final = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS")
_FT_ANNOTATIONS: Final = ("ray.io/ft-enabled", "ray.io/external-storage-namespace")
_TRUE: Final = {"1", "true"}
_FIRST_RAY_WITH_TOKENS: Final = (2, 52)
_FIRST_RAY_WITH_PRIORITY: Final = (2, 56)


def find_mistakes(manifests: Iterable[Any]) -> list[str]:  # Any: parsed YAML may have any shape
    """Return what KubeRay would refuse, or would not work, each with the object's kind and name; empty if nothing."""
    mistakes: list[str] = []
    for number, one in enumerate(manifests, 1):
        if not isinstance(one, dict) or not one.get("apiVersion") or not one.get("kind"):
            mistakes.append(f"number {number} is no Kubernetes object: it needs apiVersion and kind")
            continue
        found: Iterator[str] = iter(())
        if one.get("kind") == "RayCluster":
            found = _ray_cluster_mistakes(one, _MAX_CLUSTER_NAME, one.get("spec") or {})
        elif one.get("kind") == "RayJob":
            found = _ray_job_mistakes(one)
        elif one.get("kind") == "PodDisruptionBudget":
            found = _budget_mistakes(one)
        name = f"{one.get('kind')}/{(one.get('metadata') or {}).get('name')}"
        mistakes += [f"{name}: {mistake}" for mistake in found]
    return mistakes


def _ray_cluster_mistakes(one: dict[str, Any], max_name: int, spec: dict[str, Any]) -> Iterator[str]:
    yield from _name_mistakes(one, max_name)
    head = spec.get("headGroupSpec") or {}
    groups = spec.get("workerGroupSpecs") or []
    for name, group in (("head", head), *((str(group.get("groupName")), group) for group in groups)):
        if not _containers(group):
            yield f"{name}: it has no container"
        yield from _group_mistakes(name, group)
    for group in groups:
        yield from _worker_group_mistakes(group, spec)
    yield from _fault_tolerance_mistakes(one, spec, head)
    yield from _autoscaler_mistakes(spec, head, groups)
    yield from _authentication_mistakes(spec)
    yield from _feature_gate_mistakes(spec, groups)
    if one.get("kind") == "RayCluster":
        yield from _pod_mistakes(groups)


def _name_mistakes(one: dict[str, Any], max_length: int) -> Iterator[str]:
    name = str((one.get("metadata") or {}).get("name", ""))
    if len(name) > max_length:
        yield f"its name has {len(name)} characters; {max_length} are allowed"
    if not _DNS_LABEL.fullmatch(name):
        yield "its name must be lower-case letters, digits and dashes, and begin with a letter"


def _group_mistakes(name: str, group: dict[str, Any]) -> Iterator[str]:
    params, labels = group.get("rayStartParams") or {}, group.get("labels") or {}
    if group.get("resources") and (both := [param for param in _RESOURCE_PARAMS if params.get(param)]):
        yield f"{name}: resources are set, and in rayStartParams {', '.join(both)} too; use only one of them"
    if "labels" in params:
        yield f"{name}: rayStartParams.labels is not supported; use labels of the group"
    for key, value in labels.items():
        prefix, slash, key_name = str(key).rpartition("/")
        if not _LABEL_NAME.fullmatch(key_name) or (slash and not _LABEL_PREFIX.fullmatch(prefix)):
            yield f"{name}: {key!r} is not a label's name"
        if value and not _LABEL_NAME.fullmatch(str(value)):
            yield f"{name}: label {key}: {value!r} is not a label's value"


def _worker_group_mistakes(group: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    name, fewest, most = group.get("groupName"), group.get("minReplicas"), group.get("maxReplicas")
    if not spec.get("enableInTreeAutoscaling") and (fewest is None or most is None):
        yield f"{name}: minReplicas and maxReplicas must both be set when autoscaling is off"
    for field, number in (("minReplicas", fewest), ("maxReplicas", most)):
        if number is not None and number < 0:
            yield f"{name}: {field} is {number}"
    if fewest is not None and most is not None and fewest > most:
        yield f"{name}: minReplicas is {fewest}, more than maxReplicas, {most}"
    idle_timeout_s = group.get("idleTimeoutSeconds")
    if idle_timeout_s is not None and idle_timeout_s < 0:
        yield f"{name}: idleTimeoutSeconds is {idle_timeout_s}"
    if idle_timeout_s is not None and not _has_autoscaler_v2(spec):
        yield f"{name}: idleTimeoutSeconds needs autoscalerOptions.version v2"
    if group.get("priority"):
        if not _is_ray_at_least(spec, _FIRST_RAY_WITH_PRIORITY):
            yield f"{name}: priority needs rayVersion 2.56.0 or later"
        if not _has_autoscaler_v2(spec):
            yield f"{name}: priority needs autoscalerOptions.version v2"


def _fault_tolerance_mistakes(one: dict[str, Any], spec: dict[str, Any], head: dict[str, Any]) -> Iterator[str]:
    options = spec.get("gcsFaultToleranceOptions")
    annotations = (one.get("metadata") or {}).get("annotations") or {}
    params, variables = head.get("rayStartParams") or {}, _variables(head)
    if params.get("redis-username") or "REDIS_USERNAME" in variables:
        yield "the name of Redis' user goes into gcsFaultToleranceOptions.redisUsername only"
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables and annotations.get(_FT_ANNOTATIONS[0]) != "true":
            yield "RAY_REDIS_ADDRESS is set without gcsFaultToleranceOptions"
        return
    for name in _REDIS_VARIABLES:
        if name in variables:
            yield f"{name} of the head and gcsFaultToleranceOptions are both set; use only the options"
    if params.get("redis-password"):
        yield "rayStartParams.redis-password and gcsFaultToleranceOptions are both set; use only the options"
    for name in _FT_ANNOTATIONS:
        if annotations.get(name):
            yield f"the annotation {name} and gcsFaultToleranceOptions are both set; use only the options"
    if options.get("backend", "redis") == "redis" and options.get("storage") is not None:
        yield "gcsFaultToleranceOptions.storage is for the backend rocksdb only"
    if options.get("backend") == "rocksdb":
        yield "gcsFaultToleranceOptions.backend rocksdb needs the feature gate GCSFaultToleranceEmbeddedStorage"


def _autoscaler_mistakes(spec: dict[str, Any], head: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[str]:
    options = spec.get("autoscalerOptions") or {}
    variable = _variables(head).get("RAY_enable_autoscaler_v2")
    idle_timeout_s = options.get("idleTimeoutSeconds")
    if idle_timeout_s is not None and idle_timeout_s < 0:
        yield f"autoscalerOptions.idleTimeoutSeconds is {idle_timeout_s}"
    if any(one.get("name") == "KUBERAY_GEN_AUTOSCALER_START_CMD" for one in options.get("env") or []):
        yield "autoscalerOptions.env must not set KUBERAY_GEN_AUTOSCALER_START_CMD"
    if not spec.get("enableInTreeAutoscaling"):
        if variable in _TRUE:
            yield "RAY_enable_autoscaler_v2 is set, but enableInTreeAutoscaling is not"
        return
    if options.get("version") is not None and variable is not None:
        yield "autoscalerOptions.version and RAY_enable_autoscaler_v2 are both set; use only the first"
    if not _has_autoscaler_v2(spec):
        return
    for name, group in (("head", head), *((str(group.get("groupName")), group) for group in groups)):
        if _pod(group).get("restartPolicy", "Never") not in {"", "Never"}:
            yield f"{name}: restartPolicy must be Never, or not set, with autoscaler v2"


def _authentication_mistakes(spec: dict[str, Any]) -> Iterator[str]:
    options = spec.get("authOptions") or {}
    if options.get("mode") == "token":
        if not _is_ray_at_least(spec, _FIRST_RAY_WITH_TOKENS):
            yield "authOptions.mode token needs rayVersion 2.52.0 or later"
        if options.get("enableK8sTokenAuth") and options.get("secretName"):
            yield "authOptions.enableK8sTokenAuth and authOptions.secretName are both set"
    elif options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth needs mode token"


def _feature_gate_mistakes(spec: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[str]:
    if spec.get("networkPolicy") is not None:
        yield "networkPolicy needs the feature gate RayClusterNetworkPolicy, which is off by default"
    if spec.get("tlsOptions") is not None:
        yield "tlsOptions needs the feature gate RayClusterMTLS, which is off by default"
    for group in groups:
        if group.get("suspend"):
            yield f"{group.get('groupName')}: suspend needs the feature gate RayJobDeletionPolicy"


def _ray_job_mistakes(one: dict[str, Any]) -> Iterator[str]:
    spec = one.get("spec") or {}
    cluster = spec.get("rayClusterSpec")
    if cluster is None:
        if not spec.get("clusterSelector"):
            yield "one of rayClusterSpec and clusterSelector must be set"
        return
    yield from _ray_cluster_mistakes(one, _MAX_JOB_NAME, cluster)
    for field in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if (number := spec.get(field)) is not None and number < 0:
            yield f"{field} is {number}"
    for group in cluster.get("workerGroupSpecs") or []:
        if any("grpc" in (container.get("readinessProbe") or {}) for container in _containers(group)):
            yield (
                f"{group.get('groupName')}: KubeRay submits a RayJob once every pod is ready, but this gRPC readiness "
                "probe succeeds only after the job has started raypd: the two would wait for each other"
            )


def _pod_mistakes(groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the mistakes that KubeRay's operator accepts, but that break raypd."""
    for group in groups:
        name, pod = group.get("groupName"), _pod(group)
        for container in _containers(group):
            if "grpc" in (container.get("livenessProbe") or {}):
                yield f"{name}: a gRPC liveness probe kills pods before raypd has started; its controller watches them"
            hook = (((container.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}).get("command") or []
            wait = re.search(r"--wait-timeout (\d+)", " ".join(map(str, hook)))
            grace_s = pod.get("terminationGracePeriodSeconds", 30)
            if wait is not None and grace_s <= int(wait.group(1)):
                yield f"{name}: terminationGracePeriodSeconds is {grace_s}; preStop drains for up to {wait.group(1)} s"


def _budget_mistakes(one: dict[str, Any]) -> Iterator[str]:
    spec = one.get("spec") or {}
    if not any(str(key).startswith("ray.io/") for key in (spec.get("selector") or {}).get("matchLabels") or {}):
        return
    if "maxUnavailable" in spec or not isinstance(spec.get("minAvailable"), int):
        yield (
            "a RayCluster has no scale subresource, so only minAvailable, as a number, works for its pods; with "
            "anything else no node could be drained"
        )


def _has_autoscaler_v2(spec: dict[str, Any]) -> bool:
    if not spec.get("enableInTreeAutoscaling"):
        return False
    is_by_variable = _variables(spec.get("headGroupSpec") or {}).get("RAY_enable_autoscaler_v2") in _TRUE
    return (spec.get("autoscalerOptions") or {}).get("version") == "v2" or is_by_variable


def _is_ray_at_least(spec: dict[str, Any], wanted: tuple[int, int]) -> bool:
    version = re.match(r"(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
    return version is not None and (int(version.group(1)), int(version.group(2))) >= wanted


def _pod(group: dict[str, Any]) -> dict[str, Any]:
    return (group.get("template") or {}).get("spec") or {}


def _containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return _pod(group).get("containers") or []


def _variables(group: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of Ray's container, which is the first one."""
    containers = _containers(group)
    return {one["name"]: str(one.get("value", "")) for one in (containers[0].get("env") or [])} if containers else {}
