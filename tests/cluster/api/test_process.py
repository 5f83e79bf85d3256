"""The settings of a cluster's ingress hold in both of its APIs."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from actors.core.outputs.scheduler_stats import SchedulerStats
from cluster.api.controller_watch import ControllerWatch
from cluster.api.process import IngressProcess
from cluster.client import CallFailed, Credentials, GenerateClient
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.observability.status import ControllerView, RequestTraceView
from cluster.routing.request_record import EngineQueue
from cluster.sessions.session_pool import SessionPool
from cluster.settings.ingress import IngressConfig
from cluster.traces.request_trace import parse_header, parse_line
from tests.cluster.access.certificates import Authority
from tests.cluster.api.grpc.test_access import ALICE, access
from tests.cluster.api.test_model_loader import FACTS
from tests.cluster.serving_setup import FakeAdmin
from tests.trusted import member


async def test_tokens_and_certificates_of_the_settings_hold_in_every_api(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "root")
    files = authority.certify("server")
    access(tmp_path / "tokens")
    settings = {
        "port": 0,
        "admin_port": 0,
        "tls": {"certificate": files.certificate, "key": files.key},
        "tokens": tmp_path / "tokens",
        "limits": {"max_prompt_chars": 10},
        "http": {"port": 0},
    }
    process = IngressProcess(ClusterConfig(ingress=IngressConfig.model_validate(settings)), FakeAdmin(), member())
    ports = await process.start(FACTS)
    try:
        address = f"127.0.0.1:{ports.grpc}"
        alice = Credentials(ALICE, ca=authority.root)
        async with GenerateClient(address, credentials=alice) as client:
            assert (await client.get_model()).limits.max_prompt_chars == 10
            with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
                await client.status()
        async with GenerateClient(address, credentials=Credentials(ca=authority.root)) as client:
            with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
                await client.get_model()

        for token, code in ((ALICE, 200), ("raypd-nobody", 401)):
            assert await asyncio.to_thread(_models_over_http, ports.http, token, authority.root) == code
    finally:
        await process.drain(0)


def _models_over_http(port: int | None, token: str, root: Path) -> int:
    request = urllib.request.Request(f"https://127.0.0.1:{port}/v1/models")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60, context=ssl.create_default_context(cafile=root)) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


async def test_an_ingress_writes_a_request_trace_if_it_is_told_to(tmp_path: Path) -> None:
    settings = {"port": 0, "http": None, "request_trace": {"directory": tmp_path}}
    process = IngressProcess(ClusterConfig(ingress=IngressConfig.model_validate(settings)), FakeAdmin(), member())
    assert process.request_trace() is None
    ports = await process.start(FACTS)
    try:
        async with GenerateClient(f"127.0.0.1:{ports.grpc}") as client:
            with pytest.raises(CallFailed):
                await client.complete("hello", request_id="r")
    finally:
        await process.drain(0)
    assert process.request_trace() == RequestTraceView(num_lines=1)
    (text,) = await asyncio.to_thread(lambda: [path.read_text() for path in tmp_path.iterdir()])
    header, line = text.splitlines()
    assert parse_header(header).ingress == member().party.name
    assert (parse_line(line).request_id, parse_line(line).num_attempts) == ("r", 0)


async def test_records_of_requests_in_flight_get_the_queues_of_the_newest_incarnations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = {"reservation": 1, "load": 2, "batch": 3}
    newest = SchedulerStats(
        num_running_reqs=4,
        num_waiting_reqs=6,
        num_waiting_for_remote_kvs=5,
        num_waiting_by_reason=waits,
        kv_cache_usage=0.5,
    )
    stats = {("decode-0", 2): (newest, 1.0), ("decode-0", 1): (SchedulerStats(), 2.0)}
    monkeypatch.setattr(SessionPool, "stats", lambda pool: stats)
    settings = {"port": 0, "http": None}
    process = IngressProcess(ClusterConfig(ingress=IngressConfig.model_validate(settings)), FakeAdmin(), member())
    await process.start(FACTS)
    try:
        assert process._serving is not None
        expected = EngineQueue("decode-0", 4, 6, 1, 3, num_waiting_for_kv=5, kv_cache_usage=0.5)
        assert process._serving.records.queues() == {"decode-0": expected}
    finally:
        await process.drain(0)


async def test_an_ingress_traces_to_a_collector_if_it_is_told_to() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="it comes with the extra otel")
    from tests.cluster.observability.tracing.otlp_sink import otlp_sink

    with otlp_sink() as sink:
        settings = {
            "port": 0,
            "http": None,
            "tracing": {"endpoint": sink.endpoint, "sample_ratio": 1.0, "drain_timeout_s": 60},
        }
        process = IngressProcess(ClusterConfig(ingress=IngressConfig.model_validate(settings)), FakeAdmin(), member())
        ports = await process.start(FACTS)
        try:
            async with GenerateClient(f"127.0.0.1:{ports.grpc}") as client:
                with pytest.raises(CallFailed):
                    await client.complete("hello", request_id="r")
        finally:
            await process.drain(0)
        span = next(one for one in sink.spans if one.name.startswith("text_completion"))
    attributes = {one.key: one.value.string_value for one in span.attributes}
    assert (attributes["gen_ai.response.id"], attributes["error.type"]) == ("r", "invalid")
    assert attributes["raypd.ingress"] == member().party.name


async def test_metrics_are_read_without_a_call_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.api.process.ControllerWatch", partial(ControllerWatch, interval_s=1000.0))
    admin = CountingAdmin()
    settings = {"port": 0, "http": {"port": 0, "metrics_dialects": ["vllm"]}}
    config = ClusterConfig(served_model_name="m", ingress=IngressConfig.model_validate(settings))
    process = IngressProcess(config, admin, member())
    ports = await process.start(FACTS)
    try:
        await asyncio.wait_for(admin.was_asked.wait(), timeout=60)
        url = f"http://127.0.0.1:{ports.http}/metrics"
        texts = [await asyncio.to_thread(_read, path) for path in (url, url, f"{url}/vllm")]
        assert admin.num_questions == 1
        assert "raypd_controller_up 1.0" in texts[1].splitlines()
        for text in texts:
            assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in text.splitlines()
        assert "raypd_" not in "".join(line for line in texts[2].splitlines() if not line.startswith("#"))
        async with GenerateClient(f"127.0.0.1:{ports.grpc}") as client:
            await client.status()
        assert admin.num_questions == 2, "operators get the controller's status as it is now"
    finally:
        await process.drain(0)


class CountingAdmin(FakeAdmin):
    """Counts how often it is asked for its status."""

    def __init__(self) -> None:
        super().__init__()
        self.num_questions = 0
        self.was_asked = asyncio.Event()

    async def status(self) -> ControllerView:
        self.num_questions += 1
        self.was_asked.set()
        return ControllerView()


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


async def test_an_ingress_whose_files_are_wrong_does_not_open(tmp_path: Path) -> None:
    settings = {"port": 0, "tokens": tmp_path / "nothing"}
    process = IngressProcess(ClusterConfig(ingress=IngressConfig.model_validate(settings)), FakeAdmin(), member())
    with pytest.raises(InvalidConfig, match="nothing: cannot be read"):
        await process.start(FACTS)
    await process.drain(0)
