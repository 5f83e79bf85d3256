"""Metrics over HTTP: raypd's names, and vLLM's where a server is told to tell them."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request

from cluster.access.caller import Caller, calling_as
from cluster.api.http import metrics_handlers
from cluster.api.http.app import Call, ServerState
from cluster.api.http.metrics_handlers import MetricsHandlers
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.observability.load_counts import RequestLoad
from cluster.observability.metrics import ServingMetrics
from cluster.observability.status import ClusterView
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.vllm_dialect import IngressLoad, VllmDialect
from cluster.routing.request_record import RequestRecord
from cluster.settings.http import HttpConfig


async def view() -> ClusterView:
    return ClusterView("tiny", time.time(), 7, (), ())


def call(accept: str = "text/plain") -> Call:
    request = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"accept", accept.encode())]})
    return Call(request, [], ServerState(CallsInProgress(), HttpConfig()), 0.0)


def handlers(*, has_dialect: bool, is_traced: bool = False) -> MetricsHandlers:
    metrics = ServingMetrics()
    if is_traced:
        metrics.base.on_first_tokens(1, 0.3)
        Stopwatch(lambda: 0.0, metrics).show_trace(RequestRecord("r", "", "i", 1.0, "stop", ttft_s=0.3), "7" * 32)
    dialect = VllmDialect(metrics, lambda: IngressLoad(RequestLoad(3, 5)), lambda: 1.0)
    return MetricsHandlers(metrics, view, dialect if has_dialect else None)


async def test_vllms_names_are_added_where_they_are_wanted() -> None:
    plain = await handlers(has_dialect=False).metrics(call())
    both = await handlers(has_dialect=True).metrics(call())
    assert b"vllm:" not in plain.body
    assert b'vllm:num_requests_waiting{engine="0",model_name="model"} 3.0' in bytes(both.body)
    assert b"raypd_build_info" in bytes(both.body)


async def test_the_text_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def made(served: list[Metric], view: ClusterView, *, has_exemplars: bool) -> bytes:
        threads.append(threading.current_thread())
        return b""

    monkeypatch.setattr(metrics_handlers, "text_of", made)
    await handlers(has_dialect=False).metrics(call())
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_the_cheap_path_has_vllms_names_alone() -> None:
    answer = await handlers(has_dialect=True).vllm_metrics(call())
    assert b'vllm:num_requests_running{engine="0",model_name="model"} 5.0' in bytes(answer.body)
    assert b"raypd_build_info" not in bytes(answer.body)
    assert answer.headers["content-type"].startswith("text/plain; version=")


async def test_without_the_dialect_the_cheap_path_says_which_setting_adds_it() -> None:
    answer = await handlers(has_dialect=False).vllm_metrics(call())
    assert answer.status_code == 404
    assert b"metrics_dialects" in bytes(answer.body)


OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
TRACE = b'# {trace_id="' + b"7" * 32 + b'"} 0.3 1.0'


async def test_who_asks_for_openmetrics_gets_the_traces_of_examples_and_vllms_names_too() -> None:
    answer = await handlers(has_dialect=True, is_traced=True).metrics(call(OPENMETRICS))
    text = bytes(answer.body)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.count(TRACE) == 1
    assert b'vllm:num_requests_waiting{engine="0",model_name="model"} 3.0' in text
    assert text.count(b"# EOF") == 1
    assert text.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "is_traced", "caller"),
    [
        ("text/plain", True, Caller()),
        (OPENMETRICS, False, Caller()),
        (OPENMETRICS, True, Caller(tenant="alice")),
    ],
)
async def test_others_get_the_text_format(accept: str, is_traced: bool, caller: Caller) -> None:
    with calling_as(caller):
        answer = await handlers(has_dialect=False, is_traced=is_traced).metrics(call(accept))
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert b"trace_id" not in bytes(answer.body)


async def test_an_operator_of_a_tenant_gets_the_traces() -> None:
    with calling_as(Caller(tenant="alice", may_administer=True)):
        answer = await handlers(has_dialect=False, is_traced=True).metrics(call(OPENMETRICS))
    assert TRACE in bytes(answer.body)
