"""The live page over HTTP: who gets it, where, and what it says where it is off.

Tests of cluster/api/http/live_page/page_access.py, cluster/api/http/live_page/page_handlers.py,
cluster/api/http/server.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from cluster.api.http.live_page.page_access import why_off
from cluster.api.http.live_page.page_files import HEADERS
from cluster.api.http.server import HttpServer
from cluster.api.shared.ports import IngressPorts
from cluster.observability.record_store import RecordStore
from cluster.observability.request_records import RequestRecords
from cluster.settings.http import HttpConfig
from cluster.settings.ingress import IngressConfig
from tests.cluster.api.grpc.test_access import ALICE, OPS, access
from tests.cluster.api.http.http_setup import chat_pair, http_setup, view_of
from tests.cluster.routing.record_samples import record


async def _first(http: httpx2.AsyncClient, path: str = "/ui/events", token: str | None = None) -> dict[str, object]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with asyncio.timeout(60), http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                shown: dict[str, object] = json.loads(line[6:])
                return shown
    raise AssertionError("the stream had no event")


async def test_on_loopback_without_tokens_everybody_gets_the_page_and_its_snapshots() -> None:
    async with http_setup() as setup:
        page = await setup.http.get("/ui")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert {name: page.headers[name] for name in HEADERS} == dict(HEADERS)
        script = await setup.http.get("/ui/vendor/uplot-1.6.32/uPlot.iife.min.js")
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        first = await _first(setup.http)
        assert (first["model"], first["is_first"], first["controller_error"]) == ("tiny", True, "no controller")


async def test_paths_beside_the_files_are_not_found() -> None:
    async with http_setup() as setup:
        for path in ("/ui/../server.py", "/ui/%2e%2e/server.py", "/ui/vendor/uplot-1.6.32/LICENSE", "/ui/none.js"):
            assert (await setup.http.get(path)).status_code == 404, path
        assert (await setup.http.post("/ui/events")).status_code == 405


async def test_with_tokens_only_operators_get_snapshots(tmp_path: Path) -> None:
    async with http_setup(access=access(tmp_path / "tokens")) as setup:
        assert (await setup.http.get("/ui")).status_code == 200, "the files have no secrets"
        assert (await setup.http.get("/ui/events")).status_code == 401
        refused = await setup.http.get("/ui/events", headers={"authorization": f"Bearer {ALICE}"})
        assert refused.status_code == 403
        assert "`admin: true`" in refused.json()["error"]["message"]
        assert (await _first(setup.http, token=OPS))["model"] == "tiny"


async def test_the_last_requests_are_a_trace_for_perfetto_which_only_operators_get(tmp_path: Path) -> None:
    async with http_setup(access=access(tmp_path / "tokens")) as setup:
        store = RecordStore(10, 1 << 20)
        for name in ("first", "second"):
            store.put(record(request_id=name))
        setup.pair.serving.records = RequestRecords("ingress-0", store)
        assert (await setup.http.get("/ui/trace.json")).status_code == 401
        for token, status in ((ALICE, 403), (OPS, 200)):
            answer = await setup.http.get("/ui/trace.json", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == status
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
        ids = [event.get("args", {}).get("request_id") for event in answer.json()["traceEvents"]]
        assert {"first", "second"} <= set(ids)


async def test_one_request_is_found_by_the_beginning_of_its_id_for_operators_only(tmp_path: Path) -> None:
    async with http_setup(access=access(tmp_path / "tokens")) as setup:
        store = RecordStore(10, 1 << 20)
        for name, tenant in (("chat-3f", "a"), ("chat-4a", "a"), ("chat-3f", "b")):
            store.put(record(request_id=name, tenant=tenant))
        setup.pair.serving.records = RequestRecords("ingress-0", store)
        assert (await setup.http.get("/ui/request.json?id=chat-3f")).status_code == 401
        refused = await setup.http.get("/ui/request.json?id=chat-3f", headers={"authorization": f"Bearer {ALICE}"})
        assert refused.status_code == 403

        async def asked(query: str) -> httpx2.Response:
            return await setup.http.get(f"/ui/request.json{query}", headers={"authorization": f"Bearer {OPS}"})

        found = await asked("?id=chat-3&tenant=b")
        assert {name: found.headers[name] for name in HEADERS} == dict(HEADERS)
        assert [(one["tenant"], one["request_id"]) for one in found.json()["stories"]] == [("b", "chat-3f")]
        assert [one["tenant"] for one in (await asked("?id=chat-3f")).json()["stories"]] == ["a", "b"]
        for query, status, reason in (
            ("", 400, "id is missing"),
            ("?id=chat", 400, "2 requests begin with this"),
            ("?id=never", 404, "no record of request 'never'"),
        ):
            answer = await asked(query)
            assert (answer.status_code, reason in answer.json()["error"]["message"]) == (status, True)


async def test_a_page_of_another_host_cannot_read_it() -> None:
    async with http_setup() as setup:
        assert (await setup.http.get("/ui/events", headers={"host": "evil.example"})).status_code == 421


async def test_with_a_port_of_its_own_the_page_is_only_there() -> None:
    config = HttpConfig(port=0, admin_port=0)
    serving = chat_pair().serving
    server = HttpServer(serving, view_of(serving), config, 60.0, host="127.0.0.1", has_admin_port=True)
    port = await server.start()
    try:
        async with httpx2.AsyncClient(verify=False, timeout=60) as http:
            own = f"http://127.0.0.1:{server.admin_port}"
            assert (await _first(http, f"{own}/ui/events"))["model"] == "tiny"
            assert (await http.get(f"{own}/ui")).status_code == 200
            assert (await http.get(f"{own}/v1/models")).status_code == 404, "clients have nothing to do there"
            for path in ("/ui", "/ui/events", "/ui/request.json?id=r", "/ui/trace.json"):
                refused = await http.get(f"http://127.0.0.1:{port}{path}")
                assert refused.status_code == 403
                assert "ingress.http.admin_port" in refused.json()["error"]["message"]
    finally:
        await server.drain(0)


async def test_a_drain_ends_the_streams_of_viewers() -> None:
    async with http_setup() as setup, asyncio.timeout(60), setup.http.stream("GET", "/ui/events") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        draining = asyncio.create_task(setup.server.drain(600))
        assert [line async for line in lines if line.startswith("event:")] == []
        await draining


@pytest.mark.parametrize(
    ("host", "asks_for_tokens", "has_other_port", "reason"),
    [
        ("127.0.0.1", False, False, None),
        ("::1", False, False, None),
        ("0.0.0.0", True, False, None),
        ("0.0.0.0", False, False, "beyond loopback (ingress.host: 0.0.0.0) and asks for no tokens: set ingress.tokens"),
        ("raypd.example", False, False, "beyond loopback"),
        ("127.0.0.1", True, True, "set ingress.http.admin_port"),
    ],
)
def test_the_reason_why_the_page_is_off_says_what_to_do(
    host: str, asks_for_tokens: bool, has_other_port: bool, reason: str | None
) -> None:
    found = why_off(host, asks_for_tokens=asks_for_tokens, has_other_port=has_other_port)
    assert found == "" if reason is None else reason in found


async def test_beyond_loopback_without_tokens_neither_files_nor_snapshots_are_answered() -> None:
    serving = chat_pair().serving
    server = HttpServer(serving, view_of(serving), HttpConfig(port=0), 60.0, host="0.0.0.0")
    port = await server.start()
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=60) as http:
            for path in ("/ui", "/ui/main.js", "/ui/events", "/ui/trace.json"):
                assert (await http.get(path)).status_code == 403
    finally:
        await server.drain(0)


def test_further_ingresses_of_a_node_take_the_next_ports_for_the_page_as_well() -> None:
    config = IngressConfig(count=3, http=HttpConfig(port=8000, admin_port=9000))
    http = IngressPorts(50053, 8002).applied_to(config).http
    assert http is not None
    assert (http.port, http.admin_port) == (8002, 9002)
    assert 9000 in config.ports


def test_ports_that_would_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"http.admin_port is 8002 and http.port 8000: 3 ingresses"):
        IngressConfig(count=3, http=HttpConfig(port=8000, admin_port=8002))
    IngressConfig(count=3, http=HttpConfig(port=8000, admin_port=8003))
