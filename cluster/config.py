"""ClusterConfig: the settings of a cluster, from a YAML file and the command line.

Nothing starts before all settings are valid; an error names the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.lora_config import LoraConfig
from actors.recording_config import DecisionRecordingConfig
from cluster.access.aims import SloConfig
from cluster.checks.model_check import find_adapter_mistakes, find_model_mistakes
from cluster.errors import InvalidConfig
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.settings.internal_tls import InternalTlsConfig, require_absolute
from cluster.settings.kubernetes import KubernetesConfig
from cluster.settings.planning import PlannerConfig
from cluster.settings.restarts import RestartConfig
from cluster.settings.routing import RoutingConfig
from kv_transfer.config import KVTransferConfig

DEMO_MODEL: Final = Path(__file__).parent / "demo_model"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineGroupConfig(_Settings):
    """The engines of one role: their number, and what each engine needs of its node."""

    count: int = Field(1, ge=0, le=1024, description="Number of engines.")
    num_cpus: float = Field(1, ge=0, description="CPU cores that Ray reserves for each rank of an engine.")
    num_gpus: float = Field(
        0, ge=0, description="GPUs that Ray reserves for each rank of an engine; with a fraction, engines share a GPU."
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources that each rank needs, by name."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray labels of the nodes where the engines may run, such as zone: a or zone: in(a,b).",
    )
    scheduler: SchedulerConfig | None = Field(
        None, description="Scheduler settings of these engines, all of them; default: the top-level scheduler settings."
    )
    cache: CacheConfig | None = Field(
        None, description="Cache settings of these engines, all of them; default: the top-level cache settings."
    )
    parallel: ParallelConfig | None = Field(
        None, description="Parallel settings of these engines, all of them; default: the top-level parallel settings."
    )
    kv_transfer: KVTransferConfig | None = Field(
        None,
        description="KV transfer settings of these engines, all of them; default: the top-level kv_transfer settings.",
    )

    @property
    def is_special(self) -> bool:
        """Whether the group has own settings of the engines, not only of their number and their nodes."""
        return any(own is not None for own in (self.scheduler, self.cache, self.parallel, self.kv_transfer))


class ControllerConfig(_Settings):
    """The nodes where the controller may run. If it does not run on Ray's head node, it survives the head's death."""

    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources that the controller needs, by name."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Ray labels of the nodes where the controller may run."
    )


class RayConfig(_Settings):
    """The Ray cluster to run in."""

    address: str | None = Field(
        None,
        description="Address of a running Ray cluster, as host:port. Default: the variable RAY_ADDRESS; without it, "
        "raypd starts a Ray cluster on this machine, which ends with raypd.",
    )
    namespace: str = Field(
        "raypd",
        min_length=1,
        description="Ray namespace of the cluster's actors. Each namespace can hold one raypd cluster.",
    )
    all_processes: bool = Field(
        False,
        description="Start all of Ray's processes in the Ray cluster that raypd starts: the agent of the dashboard and "
        "the monitors of the autoscaler and of log files, too. Ray's state API, `ray status` and Ray's own metrics "
        "need them; raypd does not.",
    )


class ClusterConfig(_Settings):
    """All settings of a cluster. By default, one prefill and one decode engine serve the demo model on the CPU."""

    model: ModelConfig = Field(
        default_factory=lambda: ModelConfig(model=str(DEMO_MODEL), dtype="float32"), description="The model to serve."
    )
    served_model_name: str | None = Field(
        None, description="Name of the model in requests; default: the name of the model's directory."
    )
    cache: CacheConfig = Field(CacheConfig(), description="The engines' KV cache.")
    scheduler: SchedulerConfig = Field(
        SchedulerConfig(), description="The scheduler: token budget, order of requests, fairness."
    )
    parallel: ParallelConfig = Field(ParallelConfig(), description="Tensor parallelism within an engine.")
    kv_transfer: KVTransferConfig = Field(KVTransferConfig(), description="How engines hand KV blocks to each other.")
    lora: LoraConfig | None = Field(None, description="LoRA adapters that requests may use; default: none.")
    prefill: EngineGroupConfig = Field(
        EngineGroupConfig(count=1),
        description="Engines that prefer to compute prompts. Without decode engines they do all of each request.",
    )
    decode: EngineGroupConfig = Field(
        EngineGroupConfig(count=1),
        description="Engines that prefer to decode. Without prefill engines they do all of each request.",
    )
    both: EngineGroupConfig = Field(EngineGroupConfig(count=0), description="Engines that prefill and decode.")
    encode: EngineGroupConfig = Field(
        EngineGroupConfig(count=0), description="Engines that encode images for the others."
    )
    routing: RoutingConfig = Field(RoutingConfig(), description="The choice of the engines that serve a request.")
    slo: SloConfig = Field(SloConfig(), description="Latencies to aim at, for requests that name no aims of their own.")
    planner: PlannerConfig = Field(PlannerConfig(), description="The choice of the numbers of engines and their roles.")
    ingress: IngressConfig = Field(IngressConfig(), description="The ingresses, to which clients connect.")
    decision_recording: DecisionRecordingConfig | None = Field(
        None,
        description="Recording of all that schedulers and routers are told and decide, tokens included, which `raypd "
        "replay` decides once more; default: none.",
    )
    controller: ControllerConfig = Field(ControllerConfig(), description="Nodes where the controller may run.")
    restarts: RestartConfig = Field(RestartConfig(), description="Restarts of engines and ingresses that die.")
    engine_host: str | None = Field(
        None,
        description="Address that engines listen on for ingresses and other engines; default: the node's address in "
        "Ray, or 127.0.0.1 in a Ray cluster that raypd starts itself.",
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="File with the secret by which engines, their ranks and ingresses authenticate each other, at the "
        "same path on every node. Each line has 64 hexadecimal digits, and the secret of every line is accepted. The "
        "file must not be accessible to users other than its owner and group. Default: the controller draws a secret "
        "and distributes it through Ray.",
    )
    block_hash_key_file: Path | None = Field(
        None,
        description="File with the key of block hashes (64 hexadecimal digits), at the same path on every node. The "
        "file must not be accessible to users other than its owner and group. Default: a new key at each start; KV "
        "stores then cannot find blocks that earlier clusters have stored.",
    )
    internal_tls: bool | InternalTlsConfig = Field(
        False,
        description="Encrypt sessions, control streams and KV data over TCP with TLS 1.3, and accept only "
        "connections with a certificate of the cluster. With true, the controller makes the certificates; otherwise "
        "name the files.",
    )
    ray: RayConfig = Field(RayConfig(), description="The Ray cluster to run in.")
    start_timeout_s: float = Field(
        600,
        gt=0,
        description="Seconds that the start may take, until every engine has loaded its weights and has answered a "
        "test request.",
    )
    place_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that the start waits for room for engines in the Ray cluster, at most half of "
        "start_timeout_s. After that the start fails, unless the other engines can serve without these; they then "
        "start whenever there is room.",
    )
    kubernetes: KubernetesConfig = Field(
        KubernetesConfig(), description="Settings of `raypd manifests`; `raypd serve` ignores them."
    )
    heartbeat_interval_s: float = Field(
        1.0, gt=0, description="Seconds between two health checks of an engine or ingress by the controller."
    )
    heartbeat_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without an answer to health checks after which an engine or ingress is replaced.",
    )
    step_deadline_s: float = Field(
        60.0, gt=0, description="Seconds that one step of an engine may take before the engine is replaced as stuck."
    )
    drain_timeout_s: float = Field(
        30,
        ge=0,
        description="Seconds in which running requests may finish when an engine, ingress or the cluster is drained.",
    )

    @model_validator(mode="after")
    def _requests_can_be_served(self) -> Self:
        if self.prefill.count + self.decode.count + self.both.count == 0:
            raise ValueError("no engines: set prefill.count, decode.count or both.count to at least 1")
        return self

    @model_validator(mode="after")
    def _keys_have_one_order(self) -> Self:
        named: dict[str, str] = {}
        for role in EngineRole:
            group = self.group(role)
            order = (group.cache or self.cache).key_order
            if group.count and order != "auto":
                named.setdefault(order, f"{role.value}.cache.key_order" if group.cache else "cache.key_order")
        if len(named) > 1:
            (one, one_name), (other, other_name) = named.items()
            raise ValueError(
                f"{one_name} is {one} and {other_name} is {other}: engines exchange blocks as they are, so name "
                "the same order for all of them, or for none"
            )
        return self

    @field_validator("cluster_secret_file", "block_hash_key_file")
    @classmethod
    def _is_absolute(cls, path: Path | None) -> Path | None:
        return path if path is None else require_absolute(path)

    @model_validator(mode="after")
    def _engines_can_be_configured(self) -> Self:
        """Refuse settings with which the engines of a group could not start.

        The error names the group if the group has own settings of engines.
        """
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
        """The number of CPUs that all engines reserve together, rounded up."""
        return math.ceil(
            sum(
                self.group(role).count * max(self.group(role).num_cpus, 0.001) * self.num_ranks(role)
                for role in EngineRole
            )
        )

    def num_ranks(self, role: EngineRole) -> int:
        """Return the number of tensor-parallel ranks of each engine of a role; they run on one node."""
        return self.engine_config(role).parallel.tensor_parallel_size

    @property
    def tensor_parallel_sizes(self) -> dict[str, int]:
        """The number of ranks of an engine, by the name of the setting that gives it."""
        name = "parallel.tensor_parallel_size"
        return {
            f"{role.value}.{name}" if self.group(role).parallel else name: self.num_ranks(role) for role in EngineRole
        }

    @property
    def draft_models(self) -> dict[str, str]:
        """The directories of the draft models of engines with a count above 0, by the name of the setting."""
        models = {}
        for role in EngineRole:
            group, speculative = self.group(role), self.engine_config(role).scheduler.speculative
            if group.count and speculative is not None and speculative.model is not None:
                place = f"{role.value}." if group.scheduler else ""
                models[f"{place}scheduler.speculative.model"] = speculative.model
        return models

    @property
    def store_settings(self) -> tuple[str, ...]:
        """The names of the settings that give KV stores to engines with a count above 0; empty if no engine has any."""
        names = []
        for role in EngineRole:
            group, transfer = self.group(role), self.engine_config(role).kv_transfer
            place = f"{role.value}.kv_transfer" if group.kv_transfer else "kv_transfer"
            for name, is_set in (("cpu_cache_gib", transfer.cpu_cache_gib > 0), ("stores", bool(transfer.stores))):
                if group.count and is_set:
                    names.append(f"{place}.{name}")
        return tuple(dict.fromkeys(names))

    @property
    def block_sizes(self) -> dict[str, int]:
        """The tokens of a block, by the name of the setting, of engines with KV of requests and a count above 0."""
        sizes = {}
        for role in (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH):
            if (group := self.group(role)).count:
                place = f"{role.value}." if group.cache else ""
                sizes[f"{place}cache.block_size"] = (group.cache or self.cache).block_size
        return sizes

    def group(self, role: EngineRole) -> EngineGroupConfig:
        """Return the settings of one role's engines."""
        groups = {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode, EngineRole.BOTH: self.both}
        return groups.get(role, self.encode)

    def engine_config(self, role: EngineRole) -> EngineConfig:
        """Return the settings with which an engine of a role starts."""
        group = self.group(role)
        return EngineConfig(
            model=self.model,
            cache=group.cache or self.cache,
            scheduler=group.scheduler or self.scheduler,
            parallel=group.parallel or self.parallel,
            kv_transfer=group.kv_transfer or self.kv_transfer,
            lora=self.lora,
            role=role.value,
            itl_s=None if self.slo.itl_ms is None else self.slo.itl_ms / 1e3,
            ttft_s=None if self.slo.ttft_ms is None else self.slo.ttft_ms / 1e3,
            decision_recording=self.decision_recording,
        )


def load_cluster_config(path: Path | None, overrides: dict[str, Any], *, looks_at_model: bool = True) -> ClusterConfig:
    """Read a settings file, apply the command line's settings over it, and validate the result.

    path: the YAML file; None for defaults only
    overrides: nested like the file; a value of None means that the option was not given
    looks_at_model: check the files of the checkpoint and of adapters too, which have to be on this machine
    Raises InvalidConfig with one line for each mistake.
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


def find_checkpoint_mistakes(config: ClusterConfig, meanwhile: Callable[[], None] | None = None) -> list[str]:
    """Return why the model or an adapter cannot be served, by their files; meanwhile: see find_model_mistakes()."""
    sizes, drafts, stores = config.tensor_parallel_sizes, config.draft_models, config.store_settings
    mistakes = find_model_mistakes(
        config.model, sizes, drafts, stores=stores, block_sizes=config.block_sizes, meanwhile=meanwhile
    )
    return [*mistakes, *find_adapter_mistakes(config.lora)]


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


def _describe(mistake: Any) -> str:  # The type of a mistake is pydantic_core.ErrorDetails.
    field = ".".join(str(part) for part in mistake["loc"]) or "cluster"
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "extra_forbidden":
        return f"{field}: there is no such setting"
    if isinstance(mistake["input"], dict):
        return f"{field}: {message}"
    return f"{field} = {mistake['input']!r}: {message}"
