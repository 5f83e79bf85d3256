"""How a cluster is reached, and by whom: Services, NetworkPolicies, disruption budgets, metrics."""

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
    """gRPC, its headless twin for clients that balance by themselves, HTTP, and Ray's metrics of every pod.

    Operators' calls have one too, inside only, if they have a port of their own.
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
    # A long-lived HTTP/2 connection stays with the pod that it was made to: dns:///… with round_robin needs them all.
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
    """Render the rules of who may connect to whose ports. Once a rule selects a pod, nothing else may connect to it."""
    kubernetes = config.kubernetes
    every_pod: Manifest = {"matchLabels": {RAY_CLUSTER_LABEL: kubernetes.name}}
    ingresses: Manifest = {"matchLabels": group_selector(kubernetes, INGRESS)}
    head: Manifest = {"matchLabels": group_selector(kubernetes, "headgroup")}
    submitters: Manifest = {"podSelector": {"matchLabels": {SUBMITTER_LABEL: "true"}}}

    def policy(purpose: str, selector: Manifest, rule: Manifest) -> Manifest:
        spec: Manifest = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
        return manifest("networking.k8s.io/v1", "NetworkPolicy", f"{kubernetes.name}-{purpose}", kubernetes, spec=spec)

    policies = [
        # Ray's ports, the engines' and the KV links' are free ones: within the cluster all are open.
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
    """Nodes are emptied one pod of a group at a time.

    By minAvailable, a number: Kubernetes takes maxUnavailable and percentages only from owners with a scale
    subresource, which a RayCluster does not have, and would allow no eviction at all.
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
    """For the Prometheus operator: Ray's metrics of every pod, and raypd's, which ingresses tell by HTTP."""
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
