"""The settings of an ingress's HTTP API."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

ToolParserName = Literal["hermes", "llama3_json", "mistral", "qwen3_coder"]
ReasoningParserName = Literal["deepseek_r1", "mistral", "qwen3"]

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.\-\[\]:]+)$")]

HostName = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.:\[\]-]+)$")]

DEFAULT_PORT: Final = 8000


class HttpConfig(BaseModel):
    """OpenAI's API over HTTP, at each ingress."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: int = Field(
        DEFAULT_PORT,
        ge=0,
        le=65535,
        description="Further ingresses on one node take the next ones; 0 takes free ones, and is the default beside "
        "ingress.port: 0.",
    )
    tool_parser: ToolParserName | None = Field(
        None, description="How the model writes tool calls; hermes is Qwen's way too. None: only forced calls are read."
    )
    reasoning_parser: ReasoningParserName | None = Field(
        None, description="How the model marks its reasoning; deepseek_r1: its template has begun it. None: no split."
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="Size of a request's body.")
    max_header_bytes: int = Field(
        65_536,
        ge=1024,
        description="Size of a request's headers together; more are answered 431, and the connection ends.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Limit on the connections of all clients together. For one more, the connection ends that has "
        "waited longest for a request; if all have one, the new one is answered 503.",
    )
    max_bodies_mib: int = Field(
        256,
        ge=1,
        description="Memory for all bodies that are received or worked on, beyond the first 64 KiB of each, until "
        "their answer begins; more are answered 429. One token gets half of it at most.",
    )
    receive_timeout_s: float = Field(
        30.0, gt=0, description="Seconds within which a request's headers have to arrive, and again its body."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Web pages that browsers let call this API (CORS), as https://chat.example.org; "
        '"*" is any. Credentials go in the authorization header, never in cookies.',
    )
    keep_alive_interval_s: float | None = Field(
        15.0,
        gt=0,
        description="No stream is silent for longer: it sends a comment before, so that proxies and clients know that "
        "it lives; from the first one on its status is 200. None: streams may be silent.",
    )
