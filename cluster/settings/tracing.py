"""The settings of traces for OpenTelemetry."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TracingConfig(BaseModel):
    """A span tree for each sampled request, sent to an OpenTelemetry collector by OTLP over HTTP.

    It needs the extra `otel` (docs/observability.md). No span has a prompt, a token or a text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(
        "http://127.0.0.1:4318/v1/traces",
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        max_length=2048,
        description="URL of the collector's OTLP receiver for traces over HTTP. Its headers, certificates and "
        "compression are OpenTelemetry's environment variables OTEL_EXPORTER_OTLP_*, on the nodes of ingresses.",
    )
    service_name: str = Field("raypd", min_length=1, max_length=256, description="Name of the service in traces.")
    sample_ratio: float = Field(0.01, ge=0, le=1, description="Part of all requests that is traced.")
    max_traces_per_s: float = Field(
        10.0, gt=0, le=1000, description="Limit on the traces of each ingress per second; further requests have none."
    )
    max_client_traces_per_s: float = Field(
        1.0,
        ge=0,
        le=1000,
        description="Limit on the traces of each ingress per second that clients ask for, by a sampled `traceparent`; "
        "beyond it their requests are traced like all others.",
    )
    max_queued_spans: int = Field(
        2048, ge=64, le=1 << 20, description="Limit on the spans that wait for the collector; the oldest are dropped."
    )
    drain_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Seconds that an ingress that ends waits for the collector to take what is left."
    )
