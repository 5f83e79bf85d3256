"""KubernetesConfig: what a cluster's pods need of Kubernetes, beyond what its engines need of Ray."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = "0.1.0"
"""The version of raypd, by which the images are tagged."""

RAY_VERSION: Final = "2.60.0"
"""The version of Ray in the images; KubeRay's probes and its authentication depend on it."""

GPU_PRODUCTS: Final = {
    "a100": "NVIDIA-A100-SXM4-80GB",
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "l40s": "NVIDIA-L40S",
}
"""The name of a node's GPUs in the node label nvidia.com/gpu.product, which NVIDIA's feature discovery sets."""

GPU = Literal["a100", "h100", "h200", "b200", "l40s"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Toleration(_Settings):
    """A taint that pods put up with."""

    key: str = Field(description="The taint's key.")
    value: str | None = Field(None, description="The taint's value; default: any value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "NoSchedule", description="The taint's effect."
    )


class PodConfig(_Settings):
    """The pods of one worker group, or of the head. A pod of an engines' group holds one engine."""

    memory_gib: float | None = Field(
        None, gt=0, description="Memory limit and request; default: enough for what the pod holds, see docs/deploy.md."
    )
    shm_gib: float | None = Field(
        None,
        gt=0,
        description="Size of /dev/shm, which counts as part of memory_gib; default: enough for what the pod holds.",
    )
    extra_cpus: float = Field(1.0, ge=0, description="CPUs requested beyond those that Ray may give away.")
    min_pods: int | None = Field(
        None, ge=0, description="Pods that the autoscaler keeps; default: as many as there are engines or ingresses."
    )
    max_pods: int | None = Field(
        None,
        ge=1,
        description="Pods that the autoscaler may start; default: as many as there are engines or ingresses.",
    )
    gpu: GPU | None = Field(None, description="Kind of GPU for this group; default: kubernetes.gpu.")
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels of the nodes where the pods may run, beside the label of the GPU."
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), description="Taints that the pods tolerate, beside nvidia.com/gpu for pods with GPUs."
    )


class ModelsConfig(_Settings):
    """A volume with checkpoints, mounted read-only into every pod."""

    claim: str = Field(description="PersistentVolumeClaim in the same namespace, ReadOnlyMany or ReadWriteMany.")
    mount_path: str = Field(
        "/models", pattern="^/", description="Directory where the volume is mounted; model.model is below it."
    )


class RedisConfig(_Settings):
    """The Redis where Ray keeps its state, so that the cluster outlives its head pod."""

    address: str | None = Field(
        None, description="host:port of a Redis server; default: the manifests bring one of their own, on a volume."
    )
    secret: str = Field(
        "raypd-redis", description="Name of the Secret that holds the server's password, under the key `password`."
    )
    image: str = Field("redis:7.4.7-alpine", description="Image of the manifests' own Redis server.")
    volume_gib: int = Field(1, ge=1, description="Size of that server's volume.")


class TlsSecretConfig(_Settings):
    """The ingresses' certificate, in a Secret as cert-manager makes them: tls.crt, tls.key, ca.crt."""

    secret: str = Field(
        "raypd-tls",
        description="Name of the Secret. The certificate has to be for NAME-grpc.NAMESPACE.svc and "
        "NAME-admin.NAMESPACE.svc, too.",
    )
    mutual: bool = Field(
        False,
        description="Clients have to show a certificate that ca.crt has signed; raypd's own commands show this one.",
    )


class TokensSecretConfig(_Settings):
    """Bearer tokens, in a Secret: tokens.yaml as `raypd token` makes it, and an administrator's token as `operator`."""

    secret: str = Field(
        "raypd-tokens", description="Name of the Secret. Pods drain themselves with its token `operator`."
    )


class InternalTlsSecretConfig(_Settings):
    """The certificate that the cluster's processes show each other, in a Secret with tls.crt, tls.key and ca.crt."""

    secret: str = Field(
        "raypd-internal-tls",
        description="Its certificate is for the DNS name raypd.internal, for servers and clients, and ca.crt is of an "
        "authority that signs for this cluster alone.",
    )
    cert_manager: bool = Field(
        False, description="Have cert-manager make it, and its authority; default: it is made by whoever starts this."
    )


class ClusterSecretConfig(_Settings):
    """The cluster's secret, in a Secret: 64 hexadecimal digits a line, under the key `secret`."""

    secret: str = Field("raypd-cluster-secret", description="Name of the Secret.")


class BlockHashKeyConfig(_Settings):
    """The key of block hashes, in a Secret: 64 hexadecimal digits, under the key `key`."""

    secret: str = Field("raypd-block-hash-key", description="Name of the Secret.")


class RdmaConfig(_Settings):
    """How pods get at RDMA devices."""

    resource: str = Field(
        "rdma/hca_shared_devices_a", description="Name of the resource that the RDMA device plugin offers."
    )
    count: int = Field(1, ge=1, description="Devices for each pod.")
    network: str | None = Field(None, description="Multus network, as in k8s.v1.cni.cncf.io/networks.")


class MonitoringConfig(_Settings):
    """For the Prometheus operator, whose CRDs have to be there."""

    namespace: str = Field(
        "monitoring", description="Namespace of Prometheus, whose pods may reach the metrics' ports."
    )
    labels: dict[str, str] = Field(
        default_factory=lambda: {"release": "prometheus"},
        description="Labels by which the Prometheus operator finds PodMonitors.",
    )


class KubernetesConfig(_Settings):
    """The settings of `raypd manifests`. `raypd serve` does not look at them."""

    name: str = Field(
        "raypd",
        pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Name of the RayCluster; the names of all other objects begin with it.",
    )
    namespace: str = Field(
        "raypd",
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=63,
        description="Kubernetes namespace of all objects.",
    )
    image: str | None = Field(
        None,
        description="Image of all pods; default: raypd:VERSION-cpu, or raypd:VERSION-cuda where engines have GPUs.",
    )
    image_pull_secret: str | None = Field(None, description="Secret for the image's registry.")
    gpu: GPU | None = Field(
        None, description="Kind of the engines' GPUs, as the node label nvidia.com/gpu.product has it."
    )
    models: ModelsConfig | None = Field(
        None, description="Volume with checkpoints; default: none (the demo model is in the image)."
    )
    head: PodConfig = Field(PodConfig(extra_cpus=2.0), description="The pod of Ray's head.")
    ingress: PodConfig = Field(PodConfig(extra_cpus=2.0), description="The ingresses' pods.")
    prefill: PodConfig = Field(PodConfig(), description="The pods of prefill engines.")
    decode: PodConfig = Field(PodConfig(), description="The pods of decode engines.")
    both: PodConfig = Field(PodConfig(), description="The pods of engines with the role `both`.")
    encode: PodConfig = Field(PodConfig(), description="The pods of encode engines.")
    autoscaling: bool = Field(False, description="Ray's autoscaler adds pods for engines that have no room.")
    idle_timeout_s: int = Field(
        600, ge=0, description="Seconds after which the autoscaler removes a pod without an engine."
    )
    redis: RedisConfig | None = Field(
        None, description="Redis for the state of Ray's head, so that the cluster outlives the head; default: none."
    )
    tls: TlsSecretConfig | None = Field(
        None,
        description="Secret with the ingresses' certificate; default: plain text, which the NetworkPolicies keep "
        "inside.",
    )
    tokens: TokensSecretConfig | None = Field(
        None,
        description="Secret with bearer tokens; default: clients need none, and whoever reaches the operators' port, "
        "ingress.admin_port, is an operator.",
    )
    internal_tls: InternalTlsSecretConfig | None = Field(
        None, description="Files of internal_tls from a Secret; default: what the setting internal_tls says."
    )
    cluster_secret: ClusterSecretConfig | None = Field(
        None, description="cluster_secret_file from a Secret; default: the controller draws one."
    )
    block_hash_key: BlockHashKeyConfig | None = Field(
        None, description="block_hash_key_file from a Secret; default: the controller draws one."
    )
    nccl: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of pods with GPUs, over the defaults for NCCL on their network.",
    )
    rdma: RdmaConfig | None = Field(
        None, description="RDMA devices for pods with GPUs; default: NCCL uses TCP sockets."
    )
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="Type of the Service that clients call."
    )
    monitoring: MonitoringConfig | None = Field(None, description="Objects for the Prometheus operator; default: none.")

    @staticmethod
    def default_image(*, has_gpus: bool) -> str:
        """Return the image's name, as deploy/docker/Dockerfile says to tag it."""
        return f"raypd:{VERSION}-{'cuda' if has_gpus else 'cpu'}"
