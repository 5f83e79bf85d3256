"""ClusterConfig: what `raypd serve` starts, from a YAML file and the command line.

Nothing starts before the whole configuration is valid; an error names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.lora_config import LoraConfig
from cluster.access.tls import TlsConfig, is_loopback
from cluster.engine_connection import EngineRole
from cluster.errors import InvalidConfig
from cluster.gateway.config import HostName, HttpConfig
from cluster.images.config import ImageConfig
from cluster.input_limits import InputLimits
from cluster.manifests.settings import KubernetesConfig
from cluster.model_check import find_adapter_mistakes, find_model_mistakes
from kv_transfer.config import KVTransferConfig

DEMO_MODEL: Final = Path(__file__).parent / "demo_model"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineGroupConfig(_Settings):
    """The engines of one role, and what each needs of its node."""

    count: int = Field(1, ge=0, le=1024, description="How many engines.")
    num_cpus: float = Field(1, ge=0, description="CPU cores that Ray reserves for each rank of an engine.")
    num_gpus: float = Field(
        0, ge=0, description="GPUs that Ray reserves for each rank; a part of one lets engines share it."
    )
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources that each rank needs.")
    labels: dict[str, str] = Field(
        default_factory=dict, description="Ray labels of the nodes where they may be, such as zone: a or zone: in(a,b)."
    )
    scheduler: SchedulerConfig | None = Field(None, description="Instead of the cluster's scheduler settings.")
    cache: CacheConfig | None = Field(None, description="Instead of the cluster's cache settings.")
    parallel: ParallelConfig | None = Field(None, description="Instead of the cluster's parallel settings.")
    kv_transfer: KVTransferConfig | None = Field(None, description="Instead of the cluster's kv_transfer settings.")

    @property
    def is_special(self) -> bool:
        """Whether its engines differ from the others in more than their number and place."""
        return any(own is not None for own in (self.scheduler, self.cache, self.parallel, self.kv_transfer))


class IngressConfig(_Settings):
    """Where requests come in."""

    count: int = Field(1, ge=1, le=64, description="How many ingresses, spread over the nodes.")
    per_node: bool = Field(
        False, description="Instead: one on each node that has the resources and labels, also on those that come later."
    )
    host: str = Field("127.0.0.1", description="Address to listen on. Beyond loopback it needs tls, or insecure.")
    port: int = Field(
        50051, ge=0, le=65535, description="Further ingresses on one node take the next ones; 0 takes free ones."
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Of AdminService alone; default: the same as the others'. Further ingresses take the next ones.",
    )
    tls: TlsConfig | None = Field(None, description="Encrypt what clients say and hear.")
    insecure: bool = Field(False, description="Listen in plain text beyond loopback, for whoever can reach it.")
    tokens: Path | None = Field(
        None, description="File of bearer tokens, the same on every node (docs/security.md); default: none are needed."
    )
    allowed_hosts: tuple[HostName, ...] | None = Field(
        None,
        description="Host names by which HTTP clients may call, beside localhost and addresses: names, "
        '"*.example.org", or "*" for any. Default: on loopback without tokens the host\'s own name, else any.',
    )
    limits: InputLimits = Field(InputLimits(), description="What one request may ask for at most.")
    max_message_bytes: int = Field(16 * 2**20, ge=4096, description="Of one gRPC message, in or out.")
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="A client that reads nothing of its stream for so long is cut off."
    )
    http: HttpConfig | None = Field(HttpConfig(), description="OpenAI's API over HTTP; null: none.")
    use_fastokens: bool = Field(
        True,
        description="Let fastokens make the tokens of prompts, in a tenth of the time, if a comparison at the start "
        "finds that they are those of Hugging Face's tokenizers; false: these make them in any case.",
    )
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources that each one needs.")
    labels: dict[str, str] = Field(default_factory=dict, description="Ray labels of the nodes where they may be.")
    max_requests_in_flight: int = Field(1024, ge=1, description="More are answered RESOURCE_EXHAUSTED.")
    max_waiting_tokens: int = Field(
        4_000_000,
        ge=1,
        description="Tokens of the prompts that wait for their first token, together; more are answered so too.",
    )
    router: Literal["prefix_aware", "least_loaded"] = Field(
        "prefix_aware", description="Which engines a request goes to: prefix_aware weighs cached prefixes against load."
    )
    engine_timeout_s: float = Field(
        3.0,
        ge=1,
        description="An engine that is silent for so long, two heartbeats a second included, counts as lost: its "
        "requests go on elsewhere.",
    )
    busy_timeout_s: float = Field(
        60.0,
        ge=1,
        description="An ingress whose event loop has been busy with one thing for so long, and has answered no client, "
        "is replaced.",
    )
    max_attempts: int = Field(4, ge=1, description="How often a request is submitted at most if its engines fail.")
    move_preempted: bool = Field(
        True,
        description="Let another decode engine go on with a request that lacks blocks here, where that is quicker.",
    )
    recovery_timeout_s: float = Field(
        60.0, ge=0, description="How long a request whose engine failed waits for one that can go on with it."
    )
    images: ImageConfig = ImageConfig()

    @property
    def ports(self) -> tuple[int, ...]:
        """Of all doors of the first ingress of a node: gRPC's, HTTP's, operators'."""
        http = None if self.http is None else self.http.port
        return tuple(port for port in (self.port, http, self.admin_port) if port is not None)

    @model_validator(mode="after")
    def _ports_do_not_meet(self) -> Self:
        if self.admin_port and self.port and abs(self.admin_port - self.port) < self.count:
            raise ValueError(
                f"admin_port is {self.admin_port} and port {self.port}: of {self.count} ingresses on one node each "
                f"takes the next ones, and they would meet; keep the two at least {self.count} apart"
            )
        return self

    @model_validator(mode="after")
    def _is_not_open_by_mistake(self) -> Self:
        if self.tls is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host!r}, beyond loopback, and there is no tls: whoever can reach it could read along. "
                "Set tls (certificate, key), or insecure: true (--insecure) where the network keeps others out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _free_ports_are_free_for_both(cls, settings: Any) -> Any:  # whatever a file says
        """With port 0 the HTTP port is 0 as well, unless it is given."""
        if isinstance(settings, dict) and settings.get("port") == 0:
            http = settings.get("http", {})
            if isinstance(http, dict):
                return settings | {"http": {"port": 0} | http}
        return settings


class RestartConfig(_Settings):
    """How often an engine, or an ingress, that dies is tried again; see RestartPolicy. Times are in seconds."""

    window_s: float = Field(600.0, gt=0, description="Deaths longer ago do not count.")
    first_backoff_s: float = Field(1.0, ge=0, description="Wait before the second restart; it doubles from there.")
    max_backoff_s: float = Field(60.0, ge=0, description="The longest such wait.")
    max_deaths: int = Field(5, ge=1, description="So many deaths within the window put it into quarantine.")
    quarantine_s: float = Field(600.0, ge=0, description="How long.")


class ControllerConfig(_Settings):
    """Where the controller may be. Kept off Ray's head node, it lives on when that dies."""

    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources that it needs.")
    labels: dict[str, str] = Field(default_factory=dict, description="Ray labels of the nodes where it may be.")


def _absolute(path: Path) -> Path:
    """Refuse a path that means another file to each process: they run in other directories, on other nodes."""
    if not path.is_absolute():
        raise ValueError("it has to be an absolute path, which is the same on every node")
    return path


class InternalTlsConfig(_Settings):
    """Certificates for connections within the cluster, at the same paths on every node (PEM).

    Files that change are used from the next connection on.
    """

    ca: Path = Field(description="The authority whose certificates are accepted: one of the cluster's own.")
    certificate: Path = Field(
        description="For the DNS name raypd.internal, for servers and clients; all have the same."
    )
    key: Path = Field(description="The certificate's private key. Only its owner and group may read the file.")

    @field_validator("ca", "certificate", "key")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        return _absolute(path)


class RayConfig(_Settings):
    """Which Ray cluster."""

    address: str | None = Field(
        None, description="host:port of a running cluster; default: RAY_ADDRESS, or a local one that ends with us."
    )
    namespace: str = Field("raypd", min_length=1)


class ClusterConfig(_Settings):
    """Everything that one raypd cluster is made of. Without any argument: the demo model on 1P1D, on the CPU."""

    model: ModelConfig = Field(default_factory=lambda: ModelConfig(model=str(DEMO_MODEL), dtype="float32"))
    served_model_name: str | None = Field(None, description="Name in requests; default: the directory's own.")
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    lora: LoraConfig | None = Field(None, description="LoRA adapters that requests may name; default: none.")
    prefill: EngineGroupConfig = EngineGroupConfig(count=1)
    decode: EngineGroupConfig = EngineGroupConfig(count=1)
    both: EngineGroupConfig = EngineGroupConfig(count=0)
    encode: EngineGroupConfig = EngineGroupConfig(count=0)
    ingress: IngressConfig = IngressConfig()
    controller: ControllerConfig = ControllerConfig()
    restarts: RestartConfig = RestartConfig()
    engine_host: str | None = Field(
        None,
        description="Address that engines listen on, for ingresses and each other; default: their node's as Ray knows "
        "it, and loopback in a Ray cluster that raypd starts itself.",
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="File with the secret by which engines, their ranks and ingresses prove themselves to each other, "
        "at the same path on every node: 64 hexadecimal digits a line; all lines are accepted. Only its owner and "
        "group may read it. Default: the controller draws a secret and hands it out through Ray.",
    )
    block_hash_key_file: Path | None = Field(
        None,
        description="File with the key of block hashes, at the same path on every node: 64 hexadecimal digits. Only "
        "its owner and group may read it. Default: one is drawn at the start, so that KV stores that outlive the "
        "cluster find nothing of before.",
    )
    internal_tls: bool | InternalTlsConfig = Field(
        False,
        description="Encrypt sessions, control streams and KV data over TCP with TLS 1.3, and let nobody without a "
        "certificate get as far as the secret. true: the controller makes the certificates; or files of your own.",
    )
    ray: RayConfig = RayConfig()
    start_timeout_s: float = Field(600, gt=0, description="Until every engine has loaded its weights and is warm.")
    place_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How much of that engines may wait for room in the Ray cluster, half of it at most, before the "
        "start is given up; what others can serve without is waited for without limit.",
    )
    kubernetes: KubernetesConfig = KubernetesConfig()
    heartbeat_interval_s: float = Field(1.0, gt=0, description="How often the controller asks an engine how it is.")
    heartbeat_timeout_s: float = Field(
        10.0, gt=0, description="An engine that has not answered the controller for so long is replaced."
    )
    step_deadline_s: float = Field(
        60.0, gt=0, description="An engine whose step takes longer is stuck, and is replaced."
    )
    drain_timeout_s: float = Field(30, ge=0, description="How long requests may run on after Ctrl-C or SIGTERM.")

    @model_validator(mode="after")
    def _requests_can_be_served(self) -> Self:
        if (self.prefill.count > 0) != (self.decode.count > 0):
            raise ValueError(
                f"prefill.count is {self.prefill.count} and decode.count is {self.decode.count}: a handoff needs at "
                "least one of each (or none of both, with both.count > 0)"
            )
        if self.prefill.count + self.decode.count + self.both.count == 0:
            raise ValueError("no engines: set prefill.count and decode.count, or both.count, to at least 1")
        return self

    @field_validator("cluster_secret_file", "block_hash_key_file")
    @classmethod
    def _is_absolute(cls, path: Path | None) -> Path | None:
        return path if path is None else _absolute(path)

    @model_validator(mode="after")
    def _engines_can_be_configured(self) -> Self:
        """Refuse what no engine of a group could start with, under the group's name if the settings are its own."""
        mistakes: dict[tuple[str, str], InitErrorDetails] = {}
        for role in EngineRole:
            try:
                self.engine_config(role)
            except ValidationError as error:
                for mistake in error.errors():
                    place = role.value if self.group(role).is_special else ""
                    message = mistake["msg"].removeprefix("Value error, ")
                    kind = PydanticCustomError("engine_config", "{message}", {"message": message})
                    location = ((place,) if place else ()) + mistake["loc"]
                    mistakes[place, message] = InitErrorDetails(type=kind, loc=location, input={})
        if mistakes:
            raise ValidationError.from_exception_data("ClusterConfig", list(mistakes.values()))
        return self

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or Path(self.model.model).resolve().name

    @property
    def num_cpus(self) -> int:
        """CPUs that the engines reserve together, rounded up."""
        return math.ceil(
            sum(
                self.group(role).count * max(self.group(role).num_cpus, 0.001) * self.num_ranks(role)
                for role in EngineRole
            )
        )

    def num_ranks(self, role: EngineRole) -> int:
        """Tensor-parallel ranks of each engine of a role; they are placed on one node."""
        return self.engine_config(role).parallel.tensor_parallel_size

    @property
    def tensor_parallel_sizes(self) -> dict[str, int]:
        """The number of ranks of each kind of engine, by the setting's name."""
        name = "parallel.tensor_parallel_size"
        return {
            f"{role.value}.{name}" if self.group(role).parallel else name: self.num_ranks(role) for role in EngineRole
        }

    def group(self, role: EngineRole) -> EngineGroupConfig:
        """The settings of one role's engines."""
        groups = {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode, EngineRole.BOTH: self.both}
        return groups.get(role, self.encode)

    def engine_config(self, role: EngineRole) -> EngineConfig:
        """What an engine of this role is started with."""
        group = self.group(role)
        return EngineConfig(
            model=self.model,
            cache=group.cache or self.cache,
            scheduler=group.scheduler or self.scheduler,
            parallel=group.parallel or self.parallel,
            kv_transfer=group.kv_transfer or self.kv_transfer,
            lora=self.lora,
        )


def load_cluster_config(path: Path | None, overrides: dict[str, Any], *, looks_at_model: bool = True) -> ClusterConfig:
    """Read a YAML file (or nothing), lay the command line's settings over it, validate the whole.

    overrides: nested like the file; a value of None means "not given"
    looks_at_model: whether the checkpoint is on this machine
    Raises InvalidConfig with one line per mistake.
    """
    settings = _read_yaml(path) if path is not None else {}
    _overlay(settings, overrides)
    source = str(path) if path is not None else "command line"
    try:
        config = ClusterConfig.model_validate(settings)
    except ValidationError as error:
        raise InvalidConfig(source, [_describe(mistake) for mistake in error.errors()]) from error
    if looks_at_model and (mistakes := find_checkpoint_mistakes(config)):
        raise InvalidConfig(source, mistakes)
    return config


def find_checkpoint_mistakes(config: ClusterConfig) -> list[str]:
    """Why the model, or an adapter, cannot be served as it is configured, by their files on this machine."""
    return [
        *find_model_mistakes(config.model, config.tensor_parallel_sizes),
        *find_adapter_mistakes(config.lora),
    ]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidConfig(str(path), [f"cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), [f"is not YAML: {error}"]) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise InvalidConfig(str(path), [f"must be a mapping of settings, not a {type(settings).__name__}"])
    return settings


def _overlay(settings: dict[str, Any], overrides: dict[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, dict):
            section = settings.setdefault(key, {})
            if isinstance(section, dict):
                _overlay(section, value)
                if not section:
                    del settings[key]
        elif value is not None:
            settings[key] = value


def _describe(mistake: Any) -> str:  # pydantic's ErrorDetails, a TypedDict of another package's core
    field = ".".join(str(part) for part in mistake["loc"]) or "cluster"
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "extra_forbidden":
        return f"{field}: there is no such setting"
    if isinstance(mistake["input"], dict):
        return f"{field}: {message}"
    return f"{field} = {mistake['input']!r}: {message}"
