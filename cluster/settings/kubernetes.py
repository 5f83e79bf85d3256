"""KubernetesConfig: the settings of a cluster's pods and other Kubernetes objects."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = "0.1.0"
"""The version of raypd, which is part of the images' tags."""

RAY_VERSION: Final = "2.60.0"
"""The version of Ray in the images, on which KubeRay's probes and authentication depend."""

GPU_PRODUCTS: Final = {
    "a100": "NVIDIA-A100-SXM4-80GB",
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "l40s": "NVIDIA-L40S",
}
"""The value of the node label nvidia.com/gpu.product, which NVIDIA's GPU feature discovery sets, by kind of GPU."""

GPU = Literal["a100", "h100", "h200", "b200", "l40s"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Toleration(_Settings):
    """A taint of nodes that the pods tolerate."""

    key: str = Field(description="The taint's key.")
    value: str | None = Field(None, description="The taint's value; default: any value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "NoSchedule", description="The taint's effect."
    )


class PodConfig(_Settings):
    """The pods of one worker group, or of Ray's head. Each pod of an engine group runs one engine."""

    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory request and limit in GiB; default: enough for the pod's processes (docs/deploy.md).",
    )
    shm_gib: float | None = Field(
        None,
        gt=0,
        description="Size of /dev/shm in GiB, a part of memory_gib; default: enough for the pod's processes.",
    )
    extra_cpus: float = Field(
        1.0, ge=0, description="CPUs that the pod requests beyond those that engines reserve in Ray."
    )
    min_pods: int | None = Field(
        None, ge=0, description="Least number of pods with autoscaling; default: the number of engines or ingresses."
    )
    max_pods: int | None = Field(
        None, ge=1, description="Largest number of pods with autoscaling; default: the number of engines or ingresses."
    )
    gpu: GPU | None = Field(None, description="Kind of GPU for this group; default: kubernetes.gpu.")
    node_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Node labels that the pods need, in addition to the one for the kind of GPU.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), description="Taints that the pods tolerate, in addition to nvidia.com/gpu for pods with GPUs."
    )


class ModelsConfig(_Settings):
    """A volume with checkpoints, which every pod mounts read-only."""

    claim: str = Field(
        description="Name of the PersistentVolumeClaim, in the same namespace, with access mode ReadOnlyMany or "
        "ReadWriteMany."
    )
    mount_path: str = Field(
        "/models",
        pattern="^/",
        description="Directory where the pods mount the volume; model.model has to be below it.",
    )


class RedisConfig(_Settings):
    """The Redis server where Ray's head keeps its state, so that the cluster survives a restart of the head pod."""

    address: str | None = Field(
        None,
        description="Address of an existing Redis server, as host:port; default: the manifests include a Redis server "
        "with a volume.",
    )
    secret: str = Field(
        "raypd-redis", description="Name of the Secret that holds the server's password, under the key `password`."
    )
    image: str = Field("redis:7.4.7-alpine", description="Image of the Redis server that the manifests include.")
    volume_gib: int = Field(1, ge=1, description="Size of the included Redis server's volume in GiB.")


class TlsSecretConfig(_Settings):
    """The ingresses' certificate, in a Secret with the keys tls.crt, tls.key and ca.crt, as cert-manager makes it."""

    secret: str = Field(
        "raypd-tls",
        description="Name of the Secret. The certificate's names have to include NAME-grpc.NAMESPACE.svc and "
        "NAME-admin.NAMESPACE.svc.",
    )
    mutual: bool = Field(
        False,
        description="Require clients to show a certificate that ca.crt has signed (mutual TLS). raypd's own commands "
        "in the pods show the ingresses' certificate.",
    )


class TokensSecretConfig(_Settings):
    """Bearer tokens, in a Secret with the token file (tokens.yaml, see `raypd token`) and an administrator's token."""

    secret: str = Field(
        "raypd-tokens",
        description="Name of the Secret. Its key tokens.yaml is the token file; its key operator is an administrator's "
        "token, with which pods drain themselves.",
    )


class InternalTlsSecretConfig(_Settings):
    """The certificate that the cluster's processes show each other, in a Secret with tls.crt, tls.key and ca.crt."""

    secret: str = Field(
        "raypd-internal-tls",
        description="Name of the Secret. The certificate has to be for the DNS name raypd.internal, for servers and "
        "clients; ca.crt has to be an authority that signs certificates for this cluster alone.",
    )
    cert_manager: bool = Field(
        False,
        description="Let cert-manager create the Secret, the certificate and its authority; default: you create the "
        "Secret.",
    )


class ClusterSecretConfig(_Settings):
    """The cluster's secret, in a Secret under the key `secret`: lines of 64 hexadecimal digits."""

    secret: str = Field("raypd-cluster-secret", description="Name of the Secret.")


class BlockHashKeyConfig(_Settings):
    """The key of block hashes, in a Secret under the key `key`: 64 hexadecimal digits."""

    secret: str = Field("raypd-block-hash-key", description="Name of the Secret.")


class RdmaConfig(_Settings):
    """RDMA devices for pods with GPUs."""

    resource: str = Field(
        "rdma/hca_shared_devices_a", description="Name of the resource that the RDMA device plugin offers."
    )
    count: int = Field(1, ge=1, description="Number of devices for each pod.")
    network: str | None = Field(
        None,
        description="Multus network of the pods, as in the annotation k8s.v1.cni.cncf.io/networks; default: none.",
    )


class MonitoringConfig(_Settings):
    """PodMonitors for the Prometheus operator, whose CRDs have to be installed."""

    namespace: str = Field(
        "monitoring", description="Namespace of Prometheus; the NetworkPolicies let its pods reach the metrics ports."
    )
    labels: dict[str, str] = Field(
        default_factory=lambda: {"release": "prometheus"},
        description="Labels of the PodMonitors, by which the Prometheus operator selects them.",
    )


class InferencePoolConfig(_Settings):
    """The ingresses as an InferencePool of the Gateway API Inference Extension, whose CRDs have to be installed."""

    endpoint_picker: str = Field(
        "raypd-epp",
        description="Name of the Service of the endpoint picker, which you install. It reads the ingresses' metrics "
        "under vLLM's names, so ingress.http.metrics_dialects needs vllm; it shows no token.",
    )
    port: int = Field(9002, ge=1, le=65535, description="Port of the endpoint picker's Service.")
    failure_mode: Literal["FailOpen", "FailClose"] = Field(
        "FailOpen",
        description="Whether the gateway forwards requests to any ingress (FailOpen) or refuses them (FailClose) while "
        "the endpoint picker does not answer.",
    )


class KubernetesConfig(_Settings):
    """The settings of `raypd manifests`; `raypd serve` ignores them."""

    name: str = Field(
        "raypd",
        pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
        description="Name of the RayCluster, with which the names of all other objects begin.",
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
    image_pull_secret: str | None = Field(
        None, description="Name of the Secret for pulling from the image's registry; default: none."
    )
    gpu: GPU | None = Field(
        None,
        description="Kind of the engines' GPUs, by which nodes are selected (nvidia.com/gpu.product); default: any.",
    )
    models: ModelsConfig | None = Field(
        None, description="Volume with checkpoints; default: none, and the image has to contain the model."
    )
    head: PodConfig = Field(PodConfig(extra_cpus=2.0), description="The pod of Ray's head node.")
    ingress: PodConfig = Field(PodConfig(extra_cpus=2.0), description="The ingresses' pods.")
    prefill: PodConfig = Field(PodConfig(), description="The pods of prefill engines.")
    decode: PodConfig = Field(PodConfig(), description="The pods of decode engines.")
    both: PodConfig = Field(PodConfig(), description="The pods of engines with the role `both`.")
    encode: PodConfig = Field(PodConfig(), description="The pods of encode engines.")
    autoscaling: bool = Field(
        False, description="Let Ray's autoscaler add pods for engines without room, and remove idle pods."
    )
    idle_timeout_s: int = Field(
        600, ge=0, description="Seconds after which the autoscaler removes a pod without an engine."
    )
    redis: RedisConfig | None = Field(
        None,
        description="Redis server for the state of Ray's head, so that the cluster survives a restart of the head pod; "
        "default: none.",
    )
    tls: TlsSecretConfig | None = Field(
        None, description="Secret with the ingresses' certificate; default: clients' connections are not encrypted."
    )
    tokens: TokensSecretConfig | None = Field(
        None,
        description="Secret with bearer tokens; default: clients need no token, and every pod that the NetworkPolicies "
        "let reach ingress.admin_port may change the cluster.",
    )
    internal_tls: InternalTlsSecretConfig | None = Field(
        None, description="Secret with the files of internal_tls; default: the setting internal_tls applies unchanged."
    )
    cluster_secret: ClusterSecretConfig | None = Field(
        None, description="Secret with the content of cluster_secret_file; default: the controller draws a secret."
    )
    block_hash_key: BlockHashKeyConfig | None = Field(
        None, description="Secret with the content of block_hash_key_file; default: the controller draws a key."
    )
    nccl: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of pods with GPUs; they override the defaults for NCCL.",
    )
    rdma: RdmaConfig | None = Field(
        None, description="RDMA devices for pods with GPUs; default: NCCL uses TCP sockets."
    )
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="Type of the Service that clients call."
    )
    inference_pool: InferencePoolConfig | None = Field(
        None, description="InferencePool of the ingresses, for a gateway with an endpoint picker; default: none."
    )
    monitoring: MonitoringConfig | None = Field(None, description="Objects for the Prometheus operator; default: none.")

    @staticmethod
    def default_image(*, has_gpus: bool) -> str:
        """Return the default image, with the tag that deploy/docker/Dockerfile recommends."""
        return f"raypd:{VERSION}-{'cuda' if has_gpus else 'cpu'}"
