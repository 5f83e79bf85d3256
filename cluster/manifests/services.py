"""How a cluster is reached, and by whom: Services, NetworkPolicies, disruption budgets, metrics."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.json_types import JSON
from cluster.manifests.objects import (
    DASHBOARD_PORT,
    METRICS_PORT,
    RAY_CLUSTER_LABEL,
    SUBMITTER_LABEL,
    Manifest,
    group_selector,
    manifest,
)
from cluster.manifests.placement import HEAD, INGRESS, worker_groups


def services(config: ClusterConfig) -> list[Manifest]:
    """gRPC, its headless twin for clients that balance by themselves, and the metrics of every pod."""
    kubernetes = config.kubernetes
    port = config.ingress.port
    # h2c is HTTP/2 without TLS.
    protocol = "kubernetes.io/h2c" if kubernetes.tls is None else "https"
    grpc: JSON = [{"name": "grpc", "port": port, "targetPort": port, "appProtocol": protocol}]
    metrics: JSON = [{"name": "metrics", "port": METRICS_PORT, "targetPort": METRICS_PORT}]
    ingresses = group_selector(kubernetes, INGRESS)
    service: Manifest = {"type": kubernetes.service_type, "selector": ingresses, "ports": grpc}
    # A long-lived HTTP/2 connection stays with the pod that it was made to: dns:///… with round_robin needs them all.
    headless: Manifest = {"clusterIP": "None", "selector": ingresses, "ports": grpc}
    all_pods: Manifest = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": group_selector(kubernetes),
        "ports": metrics,
    }
    return [
        manifest("v1", "Service", f"{kubernetes.name}-grpc", kubernetes, spec=service),
        manifest("v1", "Service", f"{kubernetes.name}-grpc-headless", kubernetes, spec=headless),
        manifest("v1", "Service", f"{kubernetes.name}-metrics", kubernetes, spec=all_pods),
    ]


def network_policies(config: ClusterConfig) -> list[Manifest]:
    """Who may connect to whose ports; once a pod is selected by any of them, nothing else may."""
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
        policy("clients", ingresses, {"ports": [{"protocol": "TCP", "port": config.ingress.port}]}),
        policy("submit", head, {"from": [submitters], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]}),
    ]
    if (monitoring := kubernetes.monitoring) is not None:
        namespace: Manifest = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": monitoring.namespace}}
        }
        ports: JSON = [{"protocol": "TCP", "port": port} for port in (METRICS_PORT, 44217, 44227)]
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
    """For the Prometheus operator: every pod of the cluster, Ray's metrics and raypd's."""
    kubernetes = config.kubernetes
    if kubernetes.monitoring is None:
        return []
    cluster_name: JSON = [
        {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"},
        {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_group"], "targetLabel": "ray_io_group"},
    ]
    monitors = []
    for node_type, ports in (("worker", ["metrics"]), (HEAD, ["metrics", "as-metrics", "dash-metrics"])):
        labels: Manifest = {RAY_CLUSTER_LABEL: kubernetes.name, "ray.io/node-type": node_type}
        spec: Manifest = {
            "selector": {"matchLabels": labels},
            "podMetricsEndpoints": [{"port": port, "relabelings": cluster_name} for port in ports],
        }
        monitor = manifest(
            "monitoring.coreos.com/v1", "PodMonitor", f"{kubernetes.name}-{node_type}", kubernetes, spec=spec
        )
        metadata = monitor["metadata"]
        assert isinstance(metadata, dict)
        labels_of_monitor = metadata["labels"]
        assert isinstance(labels_of_monitor, dict)
        labels_of_monitor |= kubernetes.monitoring.labels
        monitors.append(monitor)
    return monitors
