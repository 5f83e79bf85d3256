"""Metrics over HTTP: raypd's names, and vLLM's where a server is told to tell them."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request

from cluster.api.http import metrics_handlers
from cluster.api.http.app import Call, ServerState
from cluster.api.http.metrics_handlers import MetricsHandlers
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.observability.metrics import ServingMetrics
from cluster.observability.status import ClusterView
from cluster.observability.vllm_dialect import IngressLoad, RequestLoad, VllmDialect
from cluster.settings.http import HttpConfig


async def view() -> ClusterView:
    return ClusterView("tiny", time.time(), 7, (), ())


def call() -> Call:
    request = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})
    return Call(request, [], ServerState(CallsInProgress(), HttpConfig()), 0.0)


def handlers(*, has_dialect: bool) -> MetricsHandlers:
    metrics = ServingMetrics()
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

    def made(served: list[Metric], view: ClusterView) -> bytes:
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
