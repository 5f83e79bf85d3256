"""The InferencePool of a cluster's ingresses, for gateways with the Gateway API Inference Extension.

The endpoint picker of such a gateway chooses among the pool's pods by a few metrics, whose names it knows by a label of
the pods. To it every ingress is one vLLM server: which engines work on a request is decided behind the ingress.
"""

from __future__ import annotations

from typing import Final

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.manifests.objects import Manifest, group_selector, manifest
from cluster.manifests.pod_groups import INGRESS, client_ports

_ENGINE_TYPE: Final = {"llm-d.ai/engine-type": "vllm"}
"""The label by which endpoint pickers choose the names of metrics."""


def inference_pools(config: ClusterConfig) -> list[Manifest]:
    """Render the InferencePool; none without kubernetes.inference_pool. Raises InvalidConfig."""
    kubernetes = config.kubernetes
    pool = kubernetes.inference_pool
    if pool is None:
        return []
    http = config.ingress.http
    if http is None or "vllm" not in http.metrics_dialects:
        needed = "endpoint pickers read vLLM's names of metrics: set ingress.http.metrics_dialects to [vllm]"
        raise InvalidConfig("kubernetes.inference_pool", [needed])
    if kubernetes.tokens is not None:
        problem = "endpoint pickers show no token, so they cannot read the metrics: take kubernetes.tokens away"
        raise InvalidConfig("kubernetes.inference_pool", [problem])
    spec: Manifest = {
        "selector": {"matchLabels": group_selector(kubernetes, INGRESS)},
        "targetPorts": [{"number": client_ports(config)["http"]}],
        "endpointPickerRef": {
            "name": pool.endpoint_picker,
            "port": {"number": pool.port},
            "failureMode": pool.failure_mode,
        },
    }
    return [manifest("inference.networking.k8s.io/v1", "InferencePool", kubernetes.name, kubernetes, spec=spec)]


def labels_of_group(config: ClusterConfig, group: str) -> dict[str, str]:
    """Return the labels that an InferencePool needs on the pods of a group."""
    return dict(_ENGINE_TYPE) if group == INGRESS and config.kubernetes.inference_pool is not None else {}
