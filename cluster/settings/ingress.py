"""The settings of ingresses: where they listen, who may call, and how much they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.access.server_tls import TlsConfig
from cluster.api.protos.loopback_addresses import is_loopback
from cluster.settings.http import HostName, HttpConfig
from cluster.settings.images import ImageConfig
from cluster.settings.input_limits import InputLimits
from cluster.settings.request_recording import RequestTraceConfig
from cluster.settings.tracing import TracingConfig

_SUCCESSOR_OF_ROUTER: Final = (
    "router is now routing.mode, at the top level of the settings: in place of prefix_aware set routing.mode to "
    "disaggregate, which chooses engines in the same way, or leave the default, cost. Nothing corresponds to "
    "least_loaded: every mode weighs cached prefixes against load"
)


class IngressConfig(BaseModel):
    """The ingresses: the processes that clients connect to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(1, ge=1, le=64, description="Number of ingresses, spread over the nodes.")
    per_node: bool = Field(
        False,
        description="Run one ingress on each node with the resources and labels below, instead of count ingresses; "
        "nodes that join later get one, too.",
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on. Any other than a loopback address needs tls or insecure."
    )
    port: int = Field(
        50051,
        ge=0,
        le=65535,
        description="Port of the gRPC API. Further ingresses on one node take the next ports; 0 takes a free port.",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Separate port of AdminService, the operators' API; default: it shares port. Further ingresses on "
        "one node take the next ports.",
    )
    tls: TlsConfig | None = Field(None, description="Certificate files, with which clients' connections are encrypted.")
    insecure: bool = Field(
        False, description="Allow listening beyond loopback without TLS: others on the network may read along."
    )
    tokens: Path | None = Field(
        None,
        description="File of bearer tokens that clients need, the same on every node (docs/security.md); default: "
        "clients need no token.",
    )
    allowed_hosts: tuple[HostName, ...] | None = Field(
        None,
        description="Host names that HTTP clients may use in the Host header, beside localhost and IP addresses: "
        'names, "*.example.org", or "*" for any. Default: on loopback without tokens, the machine\'s own name; '
        "otherwise any.",
    )
    limits: InputLimits = Field(InputLimits(), description="Limits on a single request.")
    max_message_bytes: int = Field(
        16 * 2**20, ge=4096, description="Limit on the size of one gRPC message, in either direction."
    )
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which the stream of a client that reads nothing is ended."
    )
    http: HttpConfig | None = Field(HttpConfig(), description="The OpenAI-compatible HTTP API; null: no HTTP API.")
    use_fastokens: bool = Field(
        True,
        description="Tokenize prompts with fastokens, in a tenth of the time, if a comparison at the start finds the "
        "same tokens as with Hugging Face's tokenizers. false: always use Hugging Face's tokenizers.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources that each ingress needs, by name."
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Ray labels of the nodes where ingresses may run.")
    max_requests_in_flight: int = Field(
        1024, ge=1, description="Limit on the requests in flight at one ingress; further ones get RESOURCE_EXHAUSTED."
    )
    max_waiting_tokens: int = Field(
        4_000_000,
        ge=1,
        description="Limit on the prompt tokens of all requests at one ingress that wait for their first token; "
        "further requests get RESOURCE_EXHAUSTED.",
    )
    engine_timeout_s: float = Field(
        3.0,
        ge=1,
        description="Seconds of silence after which an ingress gives an engine up and continues its requests on other "
        "engines. Engines send heartbeats twice a second.",
    )
    busy_timeout_s: float = Field(
        60.0,
        ge=1,
        description="Seconds for which an ingress's event loop may be blocked by one callback before the ingress is "
        "replaced.",
    )
    max_attempts: int = Field(
        4, ge=1, description="Limit on the number of times that a request is submitted to engines if engines fail."
    )
    move_preempted: bool = Field(
        True,
        description="Migrate a preempted request to another engine if the request goes on sooner there: to a decode "
        "engine, or with routing.mode cost to a prefill engine if no decode engine has room.",
    )
    reroute_waiting: bool = Field(
        True,
        description="With routing.mode cost, submit a request whose prompt still waits in a queue to an engine that "
        "has run out of prompts, if that costs less than the wait.",
    )
    recovery_timeout_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that a request whose engine failed waits for another engine that can continue it.",
    )
    max_request_records: int = Field(
        1000,
        ge=0,
        le=20_000,
        description="Number of the last requests whose routing decisions each ingress keeps for `raypd explain`; "
        "0: none, and `raypd explain` is off.",
    )
    request_records_mib: int = Field(
        16, ge=1, le=1024, description="Limit on the memory of these records at each ingress, in MiB."
    )
    request_trace: RequestTraceConfig | None = Field(
        None, description="Trace of all requests, written to files by each ingress; default: none."
    )
    tracing: TracingConfig | None = Field(
        None, description="Traces of sampled requests for OpenTelemetry; default: none."
    )
    images: ImageConfig = Field(ImageConfig(), description="Limits on images in prompts, and their preparation.")

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the first ingress on a node: for gRPC, then those for HTTP and operators if there are any."""
        http = () if self.http is None else (self.http.port, self.http.admin_port)
        return tuple(port for port in (self.port, *http, self.admin_port) if port is not None)

    @property
    def has_port_for_operators(self) -> bool:
        """Whether operators have a port of their own, for gRPC or for HTTP, so that clients' ports are not for them."""
        return self.admin_port is not None or (self.http is not None and self.http.admin_port is not None)

    @model_validator(mode="after")
    def _ports_do_not_meet(self) -> Self:
        if self.admin_port and self.port and abs(self.admin_port - self.port) < self.count:
            raise ValueError(
                f"admin_port is {self.admin_port} and port {self.port}: {self.count} ingresses on one node take "
                f"consecutive ports, and the two ranges would overlap; keep the ports at least {self.count} apart"
            )
        return self

    @model_validator(mode="after")
    def _http_ports_do_not_meet(self) -> Self:
        http = self.http
        if http is not None and http.admin_port and http.port and abs(http.admin_port - http.port) < self.count:
            raise ValueError(
                f"http.admin_port is {http.admin_port} and http.port {http.port}: {self.count} ingresses on one node "
                f"take consecutive ports, and the two ranges would overlap; keep the ports at least {self.count} apart"
            )
        return self

    @model_validator(mode="after")
    def _is_not_open_by_mistake(self) -> Self:
        if self.tls is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host!r}, beyond loopback, and tls is not set: others on the network could read along. "
                "Set tls (certificate, key), or insecure: true (--insecure) if the network keeps others out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _router_is_named_elsewhere(cls, settings: Any) -> Any:  # Any: the settings are not validated yet
        if isinstance(settings, dict) and "router" in settings:
            raise ValueError(_SUCCESSOR_OF_ROUTER)
        return settings

    @model_validator(mode="before")
    @classmethod
    def _free_ports_are_free_for_both(cls, settings: Any) -> Any:  # Any: the settings are not validated yet
        """Make the HTTP port 0 if port is 0 and the HTTP port is not given."""
        if isinstance(settings, dict) and settings.get("port") == 0:
            http = settings.get("http", {})
            if isinstance(http, dict):
                return settings | {"http": {"port": 0} | http}
        return settings
