"""Building blocks of Kubernetes objects: metadata, labels, security contexts, volumes, and their YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import yaml

from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import KubernetesConfig

Manifest: TypeAlias = "dict[str, JSON]"

RAY_CLUSTER_LABEL: Final = "ray.io/cluster"
RAY_GROUP_LABEL: Final = "ray.io/group"
SUBMITTER_LABEL: Final = "raypd.io/submitter"
METRICS_PORT: Final = 8080
DASHBOARD_PORT: Final = 8265

POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def container_security(*added: str) -> Manifest:
    """Return the security context of a container. added: capabilities beyond the restricted pod security standard"""
    capabilities: Manifest = {"drop": ["ALL"]}
    if added:
        capabilities["add"] = list(added)
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def manifest(api_version: str, kind: str, name: str, kubernetes: KubernetesConfig, **parts: JSON) -> Manifest:
    """Return an object in the cluster's namespace, with the common labels. parts: further fields, such as spec"""
    metadata: Manifest = {"name": name}
    if kind != "Namespace":
        metadata["namespace"] = kubernetes.namespace
    metadata["labels"] = dict(common_labels(kubernetes))
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}


def common_labels(kubernetes: KubernetesConfig) -> dict[str, str]:
    """Return the labels by which all objects of a cluster can be found."""
    return {"app.kubernetes.io/name": "raypd", "app.kubernetes.io/instance": kubernetes.name}


def group_selector(kubernetes: KubernetesConfig, group: str | None = None) -> dict[str, JSON]:
    """Return the labels, set by KubeRay, that select the pods of a group, or with None of the whole RayCluster."""
    selector: dict[str, JSON] = {RAY_CLUSTER_LABEL: kubernetes.name}
    if group is not None:
        selector[RAY_GROUP_LABEL] = group
    return selector


def quantity(amount: float, unit: str = "") -> str:
    """Return a quantity as Kubernetes writes it: 4, 500m, 8Gi, 512Mi."""
    if amount == int(amount):
        return f"{int(amount)}{unit}"
    return f"{round(amount * 1024)}Mi" if unit == "Gi" else f"{round(amount * 1000)}m"


def environment(variables: Mapping[str, str]) -> list[JSON]:
    """Return the env list of a container."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def from_secret(variable: str, secret: str, key: str) -> Manifest:
    """Return an entry of a container's env whose value comes from a Secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def secret_volume(name: str, secret: str, keys: Sequence[str] = ()) -> Manifest:
    """Return a volume with a Secret's files, which are readable for the pod's user and group only.

    keys: the keys of the Secret to include; all if empty
    """
    source: Manifest = {"secretName": secret, "defaultMode": 0o440}
    if keys:
        source["items"] = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": source}


def to_yaml(documents: Iterable[JSON]) -> str:
    """Return these documents, such as manifests, as one YAML text."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as blocks, and no anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
