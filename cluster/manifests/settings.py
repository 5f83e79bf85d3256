"""KubernetesConfig: what a cluster's pods need of Kubernetes, beyond what its engines need of Ray."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = "0.1.0"
"""Of raypd, by which the images are tagged."""

RAY_VERSION: Final = "2.60.0"
"""Of the images; KubeRay's probes and its authentication depend on it."""

GPU_PRODUCTS: Final = {
    "a100": "NVIDIA-A100-SXM4-80GB",
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "l40s": "NVIDIA-L40S",
}
"""What NVIDIA's feature discovery calls a node's GPUs, in the node label nvidia.com/gpu.product."""

GPU = Literal["a100", "h100", "h200", "b200", "l40s"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Toleration(_Settings):
    """A taint that pods put up with."""

    key: str
    value: str | None = Field(None, description="Default: whatever it is.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class PodConfig(_Settings):
    """The pods of one worker group, or of the head. Of an engine's group, each pod holds one engine."""

    memory_gib: float | None = Field(
        None, gt=0, description="Limit and request; default: by what the pod holds, see docs/deploy.md."
    )
    shm_gib: float | None = Field(None, gt=0, description="/dev/shm, part of memory_gib; default: by what needs it.")
    extra_cpus: float = Field(1.0, ge=0, description="CPUs requested beyond those that Ray may give away.")
    min_pods: int | None = Field(None, ge=0, description="Default: as many as there are engines or ingresses.")
    max_pods: int | None = Field(None, ge=1, description="Default: as many as there are engines or ingresses.")
    gpu: GPU | None = Field(None, description="Instead of kubernetes.gpu.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="Node labels, besides that of the GPU.")
    tolerations: tuple[Toleration, ...] = Field((), description="Besides that of nvidia.com/gpu for GPU pods.")


class ModelsConfig(_Settings):
    """A volume with checkpoints, mounted read-only into every pod."""

    claim: str = Field(description="PersistentVolumeClaim in the same namespace, ReadOnlyMany or ReadWriteMany.")
    mount_path: str = Field("/models", pattern="^/", description="Where; model.model is a directory below it.")


class RedisConfig(_Settings):
    """Where Ray keeps its state, so that the cluster outlives its head pod."""

    address: str | None = Field(None, description="host:port of a Redis; default: one of our own, on a volume.")
    secret: str = Field("raypd-redis", description="Secret that holds its password, under the key `password`.")
    image: str = Field("redis:7.4.7-alpine", description="Of our own one.")
    volume_gib: int = Field(1, ge=1, description="Of our own one.")


class TlsSecretConfig(_Settings):
    """The ingresses' certificate, in a Secret as cert-manager makes them: tls.crt, tls.key, ca.crt."""

    secret: str = Field(
        "raypd-tls",
        description="Its certificate is also for NAME-grpc.NAMESPACE.svc and NAME-admin.NAMESPACE.svc.",
    )
    mutual: bool = Field(
        False, description="Clients must show a certificate of ca.crt; raypd's own commands show this one."
    )


class TokensSecretConfig(_Settings):
    """Bearer tokens, in a Secret: tokens.yaml as `raypd token` makes it, and an administrator's token as `operator`."""

    secret: str = Field("raypd-tokens", description="The token `operator` is for the pods' own drains.")


class RdmaConfig(_Settings):
    """How pods get at RDMA devices."""

    resource: str = Field("rdma/hca_shared_devices_a", description="Of the device plugin.")
    count: int = Field(1, ge=1, description="Devices for each pod.")
    network: str | None = Field(None, description="Multus network, as in k8s.v1.cni.cncf.io/networks.")


class MonitoringConfig(_Settings):
    """For the Prometheus operator, whose CRDs have to be there."""

    namespace: str = Field("monitoring", description="Where Prometheus runs; its pods may reach the metrics' ports.")
    labels: dict[str, str] = Field(
        default_factory=lambda: {"release": "prometheus"}, description="By which it finds PodMonitors."
    )


class KubernetesConfig(_Settings):
    """What `raypd manifests` renders besides the cluster itself. `raypd serve` does not look at it."""

    name: str = Field(
        "raypd",
        pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Of the RayCluster; other objects' names begin with it.",
    )
    namespace: str = Field("raypd", pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    image: str | None = Field(
        None, description="The only place where it is named; default: raypd:VERSION-cpu, or -cuda with GPUs."
    )
    image_pull_secret: str | None = Field(None, description="Secret for the image's registry.")
    gpu: GPU | None = Field(None, description="Kind of the engines' GPUs, by the nodes' nvidia.com/gpu.product.")
    models: ModelsConfig | None = Field(None, description="Default: none; the demo model is in the image.")
    head: PodConfig = PodConfig(extra_cpus=2.0)
    ingress: PodConfig = PodConfig(extra_cpus=2.0)
    prefill: PodConfig = PodConfig()
    decode: PodConfig = PodConfig()
    both: PodConfig = PodConfig()
    encode: PodConfig = PodConfig()
    autoscaling: bool = Field(False, description="Ray's autoscaler adds pods for engines that have no room.")
    idle_timeout_s: int = Field(600, ge=0, description="After which it takes a pod without an engine away.")
    redis: RedisConfig | None = Field(None, description="GCS fault tolerance; default: none.")
    tls: TlsSecretConfig | None = Field(None, description="Default: plain text, kept inside by the NetworkPolicies.")
    tokens: TokensSecretConfig | None = Field(
        None,
        description="Default: none are asked for: whoever reaches the port that operators have for themselves, "
        "ingress.admin_port, is one.",
    )
    nccl: dict[str, str] = Field(
        default_factory=dict, description="Environment of GPU pods, over the defaults for NCCL on their network."
    )
    rdma: RdmaConfig | None = Field(None, description="Default: NCCL over TCP sockets.")
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    monitoring: MonitoringConfig | None = Field(None, description="PodMonitors; default: none.")

    @staticmethod
    def default_image(*, has_gpus: bool) -> str:
        """As deploy/docker/Dockerfile says to tag it."""
        return f"raypd:{VERSION}-{'cuda' if has_gpus else 'cpu'}"
