"""The settings of ingresses: where clients' requests come in, and how much of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.access.server_tls import TlsConfig
from cluster.api.protos.loopback_addresses import is_loopback
from cluster.settings.http import HostName, HttpConfig
from cluster.settings.images import ImageConfig
from cluster.settings.input_limits import InputLimits


class IngressConfig(BaseModel):
    """The ingresses: where clients' requests come in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(1, ge=1, le=64, description="Number of ingresses, spread over the nodes.")
    per_node: bool = Field(
        False,
        description="Start one ingress on each node that has the resources and labels, instead of count, also on "
        "later nodes.",
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on. An address beyond loopback needs tls, or insecure."
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
        description="Port of AdminService alone; default: it shares port. Further ingresses take the next ports.",
    )
    tls: TlsConfig | None = Field(None, description="Encrypt clients' connections.")
    insecure: bool = Field(
        False, description="Listen in plain text beyond loopback, for everybody who can reach the port."
    )
    tokens: Path | None = Field(
        None, description="File of bearer tokens, the same on every node (docs/security.md); default: none are needed."
    )
    allowed_hosts: tuple[HostName, ...] | None = Field(
        None,
        description="Host names by which HTTP clients may call, beside localhost and addresses: names, "
        '"*.example.org", or "*" for any. Default: on loopback without tokens the host\'s own name, else any.',
    )
    limits: InputLimits = Field(InputLimits(), description="Bounds on what one request may ask for.")
    max_message_bytes: int = Field(16 * 2**20, ge=4096, description="Size of one gRPC message, in either direction.")
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which a client that reads nothing of its stream is cut off."
    )
    http: HttpConfig | None = Field(HttpConfig(), description="OpenAI's API over HTTP; null: no HTTP.")
    use_fastokens: bool = Field(
        True,
        description="Let fastokens make the tokens of prompts, in a tenth of the time, if a comparison at the start "
        "finds that they are those of Hugging Face's tokenizers; false: these make them in any case.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources that each ingress needs."
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Ray labels of the nodes where ingresses may run.")
    max_requests_in_flight: int = Field(
        1024, ge=1, description="Requests that one ingress works on at once; more are answered RESOURCE_EXHAUSTED."
    )
    max_waiting_tokens: int = Field(
        4_000_000,
        ge=1,
        description="Tokens of the prompts that wait for their first token, together; more are answered so too.",
    )
    router: Literal["prefix_aware", "least_loaded"] = Field(
        "prefix_aware",
        description="Policy that chooses a request's engines: prefix_aware weighs cached prefixes against load.",
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
    max_attempts: int = Field(4, ge=1, description="How many times a request is submitted at most if its engines fail.")
    move_preempted: bool = Field(
        True,
        description="Let another decode engine go on with a request that lacks blocks here, where that is quicker.",
    )
    recovery_timeout_s: float = Field(
        60.0, ge=0, description="How long a request whose engine failed waits for one that can go on with it."
    )
    images: ImageConfig = Field(ImageConfig(), description="How images in prompts are read.")

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the first ingress of a node: for gRPC, for HTTP, for operators."""
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
