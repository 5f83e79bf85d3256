"""From a client's `traceparent`, over gRPC and over HTTP, to the spans that a collector gets; and a collector away."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import grpc.aio
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="it comes with the extra otel")

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.access.trace_context import TraceContext, parse_traceparent
from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.observability.tracing.request_tracing import RequestTracing
from cluster.observability.tracing.span_export import SpanExport
from cluster.requests.serving import Serving
from cluster.settings.tracing import TracingConfig
from tests.cluster.api.http.http_setup import http_setup
from tests.cluster.observability.tracing.otlp_sink import OtlpSink, otlp_sink
from tests.cluster.serving_setup import HELLO, collect, decode_timings, make_ingress_server, make_pair, prefill_timings

CLIENT = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=True)
SECRET = "a secret prompt"


def trace_to(endpoint: str, serving: Serving, **settings: float) -> RequestTracing:
    """Let Serving trace to a collector."""
    config = TracingConfig.model_validate({"endpoint": endpoint, "sample_ratio": 0.0, "drain_timeout_s": 60} | settings)
    serving._tracing = RequestTracing(config, SpanExport(config, "ingress-0"), "ingress-0", time.monotonic)
    return serving._tracing


def names(sink: OtlpSink) -> set[tuple[str, str]]:
    """The name of each span and that of its parent."""
    by_id = {span.span_id: span.name for span in sink.spans}
    return {(by_id.get(span.parent_span_id, "the client's"), span.name) for span in sink.spans}


def root_of(sink: OtlpSink) -> Span:
    (root,) = [span for span in sink.spans if span.kind == Span.SPAN_KIND_SERVER]
    return root


async def test_a_grpc_clients_trace_gets_the_tree_of_its_request() -> None:
    pair = make_pair()
    with otlp_sink() as sink:
        tracing = trace_to(sink.endpoint, pair.serving)
        server = make_ingress_server(pair.serving)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generate_pb2_grpc.GenerateServiceStub(channel)
            request = generate_pb2.GenerateRequest(request_id="mine", text=SECRET)
            call = stub.Generate(request, metadata=[("traceparent", CLIENT.to_header())])
            producer, consumer = await pair.next_requests()
            pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings())
            pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH, timings=decode_timings())
            assert [response.text async for response in call] == ["a", "b"]
        await server.drain(grace_s=0)
        await asyncio.to_thread(tracing.close)

    root = root_of(sink)
    for engine_request in (producer, consumer):
        context = parse_traceparent(engine_request.traceparent)
        assert context == TraceContext(CLIENT.trace_id, int.from_bytes(root.span_id), is_sampled=True)
    assert {span.trace_id for span in sink.spans} == {CLIENT.trace_id.to_bytes(16)}
    assert root.parent_span_id == CLIENT.span_id.to_bytes(8)
    assert {
        ("the client's", "text_completion tiny"),
        ("text_completion tiny", "attempt"),
        ("attempt", "prefill"),
        ("attempt", "transfer"),
        ("attempt", "decode"),
    } <= names(sink)
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == "mine"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in sink.spans)
    assert not [body for body in sink.bodies if b"secret" in body]


async def test_an_http_clients_trace_gets_the_tree_of_its_request() -> None:
    with otlp_sink() as sink:
        async with http_setup() as setup:
            tracing = trace_to(sink.endpoint, setup.pair.serving)
            body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
            headers = {"traceparent": CLIENT.to_header()}
            asked = asyncio.create_task(setup.http.post("/v1/chat/completions", json=body, headers=headers))
            await setup.answer("ab", FinishReason.LENGTH)
            assert (await asked).status_code == 200
        await asyncio.to_thread(tracing.close)
    root = root_of(sink)
    assert (root.name, root.parent_span_id) == ("chat tiny", CLIENT.span_id.to_bytes(8))
    assert not [body for body in sink.bodies if b"secret" in body]


async def test_a_request_that_is_refused_has_a_span_too() -> None:
    pair = make_pair(max_requests_in_flight=0)
    with otlp_sink() as sink:
        tracing = trace_to(sink.endpoint, pair.serving, sample_ratio=1.0)
        await asyncio.gather(collect(pair.serving.generate(HELLO)), return_exceptions=True)
        await asyncio.to_thread(tracing.close)
    attributes = {one.key: one.value.string_value for one in root_of(sink).attributes}
    assert attributes["error.type"] == "overloaded"


async def test_a_collector_that_refuses_is_logged_once_and_once_more_when_it_takes_spans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pair = make_pair(max_requests_in_flight=0)
    with otlp_sink() as sink:
        tracing = trace_to(sink.endpoint, pair.serving, sample_ratio=1.0)
        for is_refusing in (True, True, False):
            sink.is_refusing = is_refusing
            await asyncio.gather(collect(pair.serving.generate(HELLO)), return_exceptions=True)
            await asyncio.to_thread(tracing._export._provider.force_flush)
        await asyncio.to_thread(tracing.close)
    assert [record.getMessage() for record in caplog.records if "collector" in record.getMessage()] == [
        "the collector takes no traces: spans are dropped",
        "the collector takes traces again",
    ]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_collector_that_never_answers_delays_no_request_and_ends_with_its_deadline() -> None:
    """The kernel takes the connection, and nobody reads from it; the queue is full long before."""
    before = set(threading.enumerate())
    pair = make_pair(max_requests_in_flight=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        settings = {"sample_ratio": 1.0, "max_traces_per_s": 1000, "max_queued_spans": 64, "drain_timeout_s": 0.1}
        tracing = trace_to(endpoint, pair.serving, **settings)
        for _ in range(200):
            await asyncio.gather(collect(pair.serving.generate(HELLO)), return_exceptions=True)
        processor = tracing._export._provider._active_span_processor._span_processors[0]
        assert len(processor._batch_processor._queue) <= 64  # type: ignore[attr-defined]  # the SDK's own bound
        await asyncio.to_thread(tracing.close)
        left = [one for one in threading.enumerate() if one not in before and "asyncio" not in one.name]
        assert left, "the collector is still waited for, by threads that keep no process from its end"
        assert all(thread.daemon for thread in left)
    for thread in left:
        await asyncio.to_thread(thread.join, 60)
