"""Services, NetworkPolicies, disruption budgets and PodMonitors of a cluster."""

from __future__ import annotations

from typing import Final

from cluster.config import ClusterConfig
from cluster.manifests.objects import (
    DASHBOARD_PORT,
    METRICS_PORT,
    RAY_CLUSTER_LABEL,
    RAY_GROUP_LABEL,
    SUBMITTER_LABEL,
    Manifest,
    group_selector,
    manifest,
)
from cluster.manifests.pod_groups import HEAD, INGRESS, OPERATOR_FILE, admin_ports, client_ports, worker_groups
from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import KubernetesConfig

_ENCRYPTED: Final = {"grpc": "https", "http": "https"}


def services(config: ClusterConfig) -> list[Manifest]:
    """Render the Services: gRPC, HTTP, AdminService if it has its own port, and the metrics of every pod.

    A second, headless Service for gRPC is for clients that balance their load themselves. The Service of AdminService
    is a ClusterIP, so it cannot be reached from outside.
    """
    kubernetes = config.kubernetes
    # h2c is HTTP/2 without TLS.
    protocols = {"grpc": "kubernetes.io/h2c", "http": "http"} if kubernetes.tls is None else _ENCRYPTED
    ports: dict[str, JSON] = {
        name: [{"name": name, "port": port, "targetPort": port, "appProtocol": protocols[name]}]
        for name, port in client_ports(config).items()
    }
    grpc = ports["grpc"]
    admin: list[JSON] = [
        {"name": name, "port": port, "targetPort": port, "appProtocol": protocols["grpc"]}
        for name, port in admin_ports(config).items()
    ]
    metrics: JSON = [{"name": "metrics", "port": METRICS_PORT, "targetPort": METRICS_PORT}]
    ingresses = group_selector(kubernetes, INGRESS)
    balanced = {
        name: {"type": kubernetes.service_type, "selector": ingresses, "ports": port} for name, port in ports.items()
    }
    # An HTTP/2 connection stays with one pod, so clients that balance by round_robin need the addresses of all pods.
    headless: Manifest = {"clusterIP": "None", "selector": ingresses, "ports": grpc}
    all_pods: Manifest = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": group_selector(kubernetes),
        "ports": metrics,
    }
    if admin:
        balanced["admin"] = {"type": "ClusterIP", "selector": ingresses, "ports": admin}
    return [
        *(
            manifest("v1", "Service", f"{kubernetes.name}-{name}", kubernetes, spec=spec)
            for name, spec in balanced.items()
        ),
        manifest("v1", "Service", f"{kubernetes.name}-grpc-headless", kubernetes, spec=headless),
        manifest("v1", "Service", f"{kubernetes.name}-metrics", kubernetes, spec=all_pods),
    ]


def network_policies(config: ClusterConfig) -> list[Manifest]:
    """Render the NetworkPolicies. Connections to a pod that no policy allows are refused."""
    kubernetes = config.kubernetes
    every_pod: Manifest = {"matchLabels": {RAY_CLUSTER_LABEL: kubernetes.name}}
    ingresses: Manifest = {"matchLabels": group_selector(kubernetes, INGRESS)}
    head: Manifest = {"matchLabels": group_selector(kubernetes, "headgroup")}
    submitters: Manifest = {"podSelector": {"matchLabels": {SUBMITTER_LABEL: "true"}}}

    def policy(purpose: str, selector: Manifest, rule: Manifest) -> Manifest:
        spec: Manifest = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
        return manifest("networking.k8s.io/v1", "NetworkPolicy", f"{kubernetes.name}-{purpose}", kubernetes, spec=spec)

    policies = [
        # Ray, engines and KV links listen on arbitrary free ports, so all ports are open within the cluster.
        policy("inside", every_pod, {"from": [{"podSelector": every_pod}]}),
        policy(
            "clients",
            ingresses,
            {"ports": [{"protocol": "TCP", "port": port} for port in client_ports(config).values()]},
        ),
        policy("submit", head, {"from": [submitters], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]}),
    ]
    if admin := admin_ports(config):
        ports: JSON = [{"protocol": "TCP", "port": port} for port in admin.values()]
        policies.append(policy("admin", ingresses, {"from": [submitters], "ports": ports}))
    if (monitoring := kubernetes.monitoring) is not None:
        namespace: Manifest = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": monitoring.namespace}}
        }
        ports = [{"protocol": "TCP", "port": port} for port in (METRICS_PORT, 44217, 44227)]
        policies.append(policy("metrics", every_pod, {"from": [namespace], "ports": ports}))
    return policies


def disruption_budgets(config: ClusterConfig) -> list[Manifest]:
    """Render the PodDisruptionBudgets, which let nodes be drained one pod of each group at a time.

    minAvailable is a number, since a RayCluster has no scale subresource: with maxUnavailable or a percentage,
    Kubernetes would allow no eviction at all.
    """
    kubernetes = config.kubernetes
    budgets = []
    for group in worker_groups(config):
        selector: Manifest = {"matchLabels": group_selector(kubernetes, group.name)}
        spec: Manifest = {"minAvailable": max(group.num_pods - 1, 0), "selector": selector}
        name = f"{kubernetes.name}-{group.name}"
        budgets.append(manifest("policy/v1", "PodDisruptionBudget", name, kubernetes, spec=spec))
    return budgets


def pod_monitors(config: ClusterConfig) -> list[Manifest]:
    """Render the PodMonitors: of Ray's metrics in every pod, and of raypd's metrics, which ingresses serve by HTTP.

    The list is empty without kubernetes.monitoring.
    """
    kubernetes = config.kubernetes
    if kubernetes.monitoring is None:
        return []
    monitors = [
        _pod_monitor(kubernetes, "worker", {"ray.io/node-type": "worker"}, [{"port": "metrics"}]),
        _pod_monitor(
            kubernetes,
            HEAD,
            {"ray.io/node-type": HEAD},
            [{"port": port} for port in ("metrics", "as-metrics", "dash-metrics")],
        ),
    ]
    if config.ingress.http is not None:
        endpoint: Manifest = {"port": "http", "path": "/metrics"}
        if kubernetes.tls is not None:
            authority: Manifest = {"secret": {"name": kubernetes.tls.secret, "key": "ca.crt"}}
            server = f"{kubernetes.name}-grpc.{kubernetes.namespace}.svc"
            endpoint |= {"scheme": "https", "tlsConfig": {"ca": authority, "serverName": server}}
        if kubernetes.tokens is not None:
            endpoint["authorization"] = {"credentials": {"name": kubernetes.tokens.secret, "key": OPERATOR_FILE}}
        monitors.append(_pod_monitor(kubernetes, INGRESS, {RAY_GROUP_LABEL: INGRESS}, [endpoint]))
    return monitors


def _pod_monitor(kubernetes: KubernetesConfig, name: str, selected: Manifest, endpoints: list[Manifest]) -> Manifest:
    relabelings: JSON = [
        {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"},
        {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_group"], "targetLabel": "ray_io_group"},
    ]
    spec: Manifest = {
        "selector": {"matchLabels": {RAY_CLUSTER_LABEL: kubernetes.name, **selected}},
        "podMetricsEndpoints": [{**endpoint, "relabelings": relabelings} for endpoint in endpoints],
    }
    monitor = manifest("monitoring.coreos.com/v1", "PodMonitor", f"{kubernetes.name}-{name}", kubernetes, spec=spec)
    metadata = monitor["metadata"]
    assert isinstance(metadata, dict)
    labels = metadata["labels"]
    assert isinstance(labels, dict)
    assert kubernetes.monitoring is not None
    labels |= kubernetes.monitoring.labels
    return monitor
