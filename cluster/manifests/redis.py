"""The Redis server for the state of Ray's head, if the settings name no other: one pod with a volume."""

from __future__ import annotations

from typing import Final

from cluster.manifests.objects import (
    POD_SECURITY,
    Manifest,
    common_labels,
    container_security,
    from_secret,
    group_selector,
    manifest,
)
from cluster.manifests.ray_cluster import REDIS_PASSWORD_KEY
from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import KubernetesConfig

_PORT: Final = 6379


def redis_manifests(kubernetes: KubernetesConfig) -> list[Manifest]:
    """Render the Service, StatefulSet and NetworkPolicy of Redis; empty without Redis, or with another server.

    Only pods of the RayCluster can connect to the server.
    """
    if kubernetes.redis is None or kubernetes.redis.address is not None:
        return []
    name = f"{kubernetes.name}-redis"
    selector: dict[str, JSON] = {"app.kubernetes.io/component": "redis", "app.kubernetes.io/instance": kubernetes.name}
    ports: JSON = [{"name": "redis", "port": _PORT, "targetPort": _PORT}]
    service: Manifest = {"clusterIP": "None", "selector": selector, "ports": ports}
    rule: Manifest = {
        "from": [{"podSelector": {"matchLabels": group_selector(kubernetes)}}],
        "ports": [{"protocol": "TCP", "port": _PORT}],
    }
    policy: Manifest = {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": [rule]}
    return [
        manifest("v1", "Service", name, kubernetes, spec=service),
        manifest("apps/v1", "StatefulSet", name, kubernetes, spec=_stateful_set(kubernetes, name, selector)),
        manifest("networking.k8s.io/v1", "NetworkPolicy", name, kubernetes, spec=policy),
    ]


def _stateful_set(kubernetes: KubernetesConfig, name: str, selector: Manifest) -> Manifest:
    redis = kubernetes.redis
    assert redis is not None
    ready = 'REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli ping | grep -q PONG'
    container: Manifest = {
        "name": "redis",
        "image": redis.image,
        # Every write is synced to the volume before it is confirmed, so that no confirmed write is lost with the pod.
        "command": [
            "/bin/sh",
            "-c",
            'exec redis-server --requirepass "$REDIS_PASSWORD" --appendonly yes --appendfsync always --dir /data',
        ],
        "env": [from_secret("REDIS_PASSWORD", redis.secret, REDIS_PASSWORD_KEY)],
        "ports": [{"name": "redis", "containerPort": _PORT}],
        "readinessProbe": {"exec": {"command": ["/bin/sh", "-c", ready]}, "periodSeconds": 5, "timeoutSeconds": 3},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "securityContext": dict(POD_SECURITY),
        "containers": [container],
    }
    volume: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{redis.volume_gib}Gi"}},
    }
    return {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": {**common_labels(kubernetes), **selector}}, "spec": pod},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": volume}],
    }
