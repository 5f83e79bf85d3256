"""The gRPC admin service accepts the orders of an operator, and refuses all others.

Tests of cluster/api/shared/admin.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.client import CallFailed, GenerateClient
from cluster.routing.engine_connection import EngineRole
from tests.cluster.serving_setup import FakeAdmin, make_ingress_server, make_pair


@asynccontextmanager
async def client_of(admin: FakeAdmin) -> AsyncIterator[GenerateClient]:
    server = make_ingress_server(make_pair().serving, admin=admin)
    port = await server.start()
    try:
        async with GenerateClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.drain(0)


async def test_only_the_roles_that_are_given_are_scaled() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        assert await client.scale(decode=0, prefill=3) == ["d0"]
    assert admin.asked == [("scale", {EngineRole.PREFILL: 3, EngineRole.DECODE: 0})]


@pytest.mark.parametrize(("counts", "field"), [({}, "prefill"), ({"both": 1025}, "both")])
async def test_numbers_that_make_no_sense_are_refused(counts: dict[str, int], field: str) -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        with pytest.raises(CallFailed) as raised:
            await client.scale(**counts)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(raised.value.violations) == [field]
    assert not admin.asked


async def test_an_engine_is_drained_and_gets_another_role() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        await client.drain("d0", for_good=True)
        await client.set_role("d0", "both")
    assert admin.asked == [("drain", "d0", True), ("set_role", "d0", EngineRole.BOTH)]


async def test_an_engine_that_does_not_serve_is_not_found() -> None:
    async with client_of(FakeAdmin()) as client:
        for call in (client.drain("p9"), client.set_role("p9", "decode")):
            with pytest.raises(CallFailed, match="no engine 'p9' serves; these do: d0") as raised:
                await call
            assert raised.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_role_that_does_not_exist_is_refused() -> None:
    async with client_of(FakeAdmin()) as client:
        with pytest.raises(CallFailed, match="prefill, decode, both"):
            await client.set_role("d0", "router")


async def test_a_node_is_drained_and_an_unknown_one_is_not_found() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        assert await client.drain_node("host-0") == ["d0"]
        with pytest.raises(CallFailed, match="'host-9' does not name one node of the Ray cluster") as raised:
            await client.drain_node("host-9")
    assert raised.value.code is grpc.StatusCode.NOT_FOUND
    assert admin.asked == [("drain_node", "host-0")]


async def test_a_model_is_updated_unless_it_cannot_be_seen() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        assert await client.update("model-2") == 2
        with pytest.raises(CallFailed, match="update: 'model-9' is not there") as raised:
            await client.update("model-9")
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert admin.asked == [("update", "model-2")]


async def test_an_adapter_is_loaded_and_taken_away() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        assert await client.load_adapter("sql", "/adapters/sql") == "d1"
        await client.unload_adapter("sql")
        with pytest.raises(CallFailed, match="load adapter: '/etc' is not there") as refused:
            await client.load_adapter("sql", "/etc")
        with pytest.raises(CallFailed, match="name is 'c'; allowed: one of the registered adapters: sql") as unknown:
            await client.unload_adapter("c")
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND
    assert list(unknown.value.violations) == ["name"]
    assert admin.asked == [("load_adapter", "sql", "/adapters/sql"), ("unload_adapter", "sql")]


async def test_prefix_caches_are_reset_where_nothing_holds_them() -> None:
    admin = FakeAdmin()
    async with client_of(admin) as client:
        assert await client.reset_prefix_cache() == {"d0": False, "p0": True}
        assert await client.reset_prefix_cache("d0", preempt=True) == {"d0": True, "p0": True}
        with pytest.raises(CallFailed, match="NOT_FOUND"):
            await client.reset_prefix_cache("d9")
    assert admin.asked == [("reset_prefix_cache", "", False), ("reset_prefix_cache", "d0", True)]


async def test_the_clusters_secret_is_replaced_or_the_file_is_named_where_it_is() -> None:
    async with client_of(FakeAdmin()) as client:
        assert not await client.rotate_secret()
        assert await client.rotate_secret()
        with pytest.raises(CallFailed, match="cluster_secret_file, /etc/raypd/secret: write a new secret") as refused:
            await client.rotate_secret()
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_engine_is_profiled_for_a_bounded_time() -> None:
    async with client_of(FakeAdmin()) as client:
        for duration_s in (0.0, -1.0, 61.0, float("nan"), float("inf")):
            with pytest.raises(CallFailed, match="INVALID_ARGUMENT") as raised:
                await client.profile("d0", duration_s)
            assert list(raised.value.violations) == ["duration_seconds"]
        answer = await client.profile("d0", 0.5, with_trace=True)
        assert (answer.summary, answer.trace) == ("a table", b"a trace")
        with pytest.raises(CallFailed, match="FAILED_PRECONDITION: engine d0: it is being profiled already"):
            await client.profile("d0", 0.5)
