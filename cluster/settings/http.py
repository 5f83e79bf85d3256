"""The settings of an ingress's HTTP API."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

ToolParserName = Literal["hermes", "llama3_json", "mistral", "qwen3_coder"]
ReasoningParserName = Literal["deepseek_r1", "mistral", "qwen3"]

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.\-\[\]:]+)$")]

HostName = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.:\[\]-]+)$")]

DEFAULT_PORT: Final = 8000


MetricsDialect = Literal["vllm"]


class HttpConfig(BaseModel):
    """OpenAI's API over HTTP, at each ingress."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: int = Field(
        DEFAULT_PORT,
        ge=0,
        le=65535,
        description="Port of the HTTP API. Further ingresses on one node take the next ports; 0 takes a free port. "
        "With ingress.port: 0 the default is 0.",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Separate port of the live page /ui, for operators; 0 takes a free port. Default: the HTTP port "
        "has the page, unless ingress.admin_port is set: then the page is off. Further ingresses on one node take the "
        "next ports.",
    )
    metrics_dialects: tuple[MetricsDialect, ...] = Field(
        (),
        description="Further names under which /metrics tells this ingress's own load, for tools that do not know "
        "raypd's: vllm adds vLLM's, as endpoint pickers of the Gateway API Inference Extension read them. "
        "/metrics/vllm has these names alone, and is cheap enough to be read many times a second.",
    )
    tool_parser: ToolParserName | None = Field(
        None,
        description="Format in which the model writes tool calls; Qwen models use hermes, too. Default: only tool "
        "calls that the request forces are recognized.",
    )
    reasoning_parser: ReasoningParserName | None = Field(
        None,
        description="Format in which the model marks its reasoning; with deepseek_r1, the chat template has begun the "
        "reasoning already. Default: reasoning is not separated from the answer.",
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="Limit on the size of a request's body.")
    max_header_bytes: int = Field(
        65_536,
        ge=1024,
        description="Limit on the size of all headers of a request; larger ones get status 431, and the connection is "
        "closed.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Limit on the connections of all clients together. For a further connection, the one that has been "
        "idle longest is closed; if all have a request, the new connection gets status 503.",
    )
    max_bodies_mib: int = Field(
        256,
        ge=1,
        description="Memory for the bodies of all requests whose answer has not begun, without the first 64 KiB of "
        "each; further requests get status 429. One token may use half of this memory.",
    )
    receive_timeout_s: float = Field(
        30.0, gt=0, description="Seconds within which a request's headers have to arrive, and again its body."
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins of web pages that may call this API from a browser (CORS), such as "
        'https://chat.example.org; "*" allows all. Cookies are never accepted as credentials.',
    )
    keep_alive_interval_s: float | None = Field(
        15.0,
        gt=0,
        description="Longest silence of a stream, in seconds: after it the stream sends a comment, so that proxies and "
        "clients keep the connection. The first comment fixes the status as 200. null: send no comments.",
    )
