"""Answers those who read metrics: /metrics, and /metrics/vllm for tools that know only vLLM's names.

A caller who may use only some adapters must not learn the names of others: these have no series of their own then. Nor
must a tenant learn the traces of others: only callers who belong to no tenant, or who may administer, get exemplars.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from cluster.access.caller import Caller, current_caller
from cluster.api.http.app import Call
from cluster.api.http.errors import refused
from cluster.api.http.openapi import Operation
from cluster.api.http.shared_texts import SharedTextResponse, SharedTexts
from cluster.observability.metrics import ServingMetrics, text_of
from cluster.observability.prometheus.exposition import OPENMETRICS_TYPE, accepts_openmetrics
from cluster.observability.status import ClusterView
from cluster.observability.vllm_dialect import VllmDialect

METRICS: Final = Operation("/metrics", "GET", "Return metrics in Prometheus' text format.", None, None)
VLLM_METRICS: Final = Operation(
    "/metrics/vllm",
    "GET",
    "Return this ingress's load under vLLM's names, if metrics_dialects has vllm.",
    None,
    None,
    errors=(401, 403, 404, 421, 429, 500, 503),
)


class MetricsHandlers:
    """The handlers of both paths."""

    def __init__(
        self, metrics: ServingMetrics, view: Callable[[], Awaitable[ClusterView]], dialect: VllmDialect | None
    ) -> None:
        """Keep what the handlers use.

        view:    makes a view of the cluster as it was lately, without asking another process
        dialect: adds metrics under vLLM's names; None: there are none
        """
        self._metrics = metrics
        self._view = view
        self._dialect = dialect
        self._texts = SharedTexts()

    async def metrics(self, call: Call) -> Response:
        """Answer /metrics in Prometheus' text format, or in OpenMetrics' with exemplars if there are any."""
        caller = current_caller()
        asks = accepts_openmetrics(call.request.headers.get("accept", ""))
        has_exemplars = asks and self._metrics.has_traces and _may_see_traces(caller)

        async def make() -> bytes:
            # The text of many engines takes tens of milliseconds, for which the tokens of all streams would have to
            # wait.
            served, names_adapters = list(self._metrics.collect(caller.may_use)), caller.adapters is None
            if has_exemplars and self._dialect is not None:
                served += self._dialect.collect(names_adapters=names_adapters)
            text = await asyncio.to_thread(text_of, served, await self._view(), has_exemplars=has_exemplars)
            if not has_exemplars and self._dialect is not None:
                text += self._dialect.text(names_adapters=names_adapters)
            return text

        text = await self._texts.get((caller.adapters, has_exemplars), make)
        return SharedTextResponse(text, 200, media_type=OPENMETRICS_TYPE if has_exemplars else CONTENT_TYPE_LATEST)

    async def vllm_metrics(self, call: Call) -> Response:
        """Answer /metrics/vllm in Prometheus' text format."""
        del call
        if (text := self.vllm_text(current_caller())) is None:
            reason = "this server's setting ingress.http.metrics_dialects does not have vllm"
            return refused(404, reason, "not_found").response()
        return Response(text, 200, media_type=CONTENT_TYPE_LATEST)

    def vllm_text(self, caller: Caller) -> bytes | None:
        """Return the text of /metrics/vllm; None if the server does not tell it."""
        return None if self._dialect is None else self._dialect.text(names_adapters=caller.adapters is None)


def _may_see_traces(caller: Caller) -> bool:
    return caller.may_administer or not caller.tenant
