"""Callers that are let in, and as whom: over real connections.

Tests of cluster/api/grpc/interceptor.py, cluster/client/client_credentials.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2

from actors.core.requests.slo import Slo
from cluster.access.access_control import AccessControl
from cluster.access.server_tls import ServerTls, TlsConfig
from cluster.access.tokens import Tokens, hash_token, make_token
from cluster.api.grpc.server import GrpcServerSettings, IngressServer
from cluster.api.protos.raypd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from cluster.client.channel import open_channel
from cluster.client.client_credentials import Credentials
from cluster.errors import InvalidConfig
from cluster.requests.serving import Serving
from cluster.settings.ingress import IngressConfig
from tests.cluster.access.certificates import Authority
from tests.cluster.access.test_allowance import Clock
from tests.cluster.serving_setup import grpc_settings, make_ingress_server, make_pair

ALICE, OPS = make_token(), make_token()


def access(path: Path) -> AccessControl:
    entries = [
        {
            "name": "alice",
            "sha256": hash_token(ALICE),
            "concurrent": 1,
            "slo": {"itl_ms": 60},
            "tightest_slo": {"ttft_ms": 100},
        },
        {"name": "ops", "sha256": hash_token(OPS), "admin": True},
    ]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return AccessControl(Tokens(path))


@asynccontextmanager
async def started(
    settings: GrpcServerSettings, serving: Serving | None = None
) -> AsyncIterator[tuple[str, IngressServer]]:
    server = make_ingress_server(serving or make_pair().serving, settings=settings)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.drain(grace_s=0)


async def ask_model(address: str, credentials: Credentials | None = None) -> str:
    async with open_channel(address, credentials) as channel:
        response = await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=60)
        return response.model


async def ask_status(address: str, credentials: Credentials | None = None) -> str:
    async with open_channel(address, credentials) as channel:
        status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
        return status.model


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def test_every_service_asks_for_a_token_but_health_and_reflection(tmp_path: Path) -> None:
    async with started(grpc_settings(access=access(tmp_path / "tokens"))) as (address, _):
        assert await ask_model(address, Credentials(ALICE)) == "tiny"
        for credentials in (None, Credentials(make_token())):
            for call in (ask_model(address, credentials), ask_status(address, credentials)):
                error = await failure_of(call)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "token" in (error.details() or "")

        async with grpc.aio.insecure_channel(address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest(service="raypd.v1.GenerateService"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_only_tokens_of_administrators_administer(tmp_path: Path) -> None:
    async with started(grpc_settings(access=access(tmp_path / "tokens"))) as (address, _):
        error = await failure_of(ask_status(address, Credentials(ALICE)))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "token 'alice' may not use AdminService" in (error.details() or "")
        assert await ask_status(address, Credentials(OPS)) == "test"


async def test_a_stream_is_its_tokens(tmp_path: Path) -> None:
    pair = make_pair()
    settings = grpc_settings(access=access(tmp_path / "tokens"))
    async with started(settings, pair.serving) as (address, _), open_channel(address, Credentials(ALICE)) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        call = stub.Generate(generate_pb2.GenerateRequest(text="hello", cache_salt="s"))
        producer, _ = await pair.next_requests()
        assert (producer.tenant, producer.cache_salt) == ("alice", "alice/s")

        with pytest.raises(grpc.aio.AioRpcError, match="token 'alice' is at its limit of 1 requests at once") as raised:
            await anext(aiter(stub.Generate(generate_pb2.GenerateRequest(text="again"))))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await anext(aiter(stub.Generate(generate_pb2.GenerateRequest(text="first!", priority=-1))))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await asyncio.wait_for(pair.decode.has_aborted.wait(), timeout=60)


async def test_a_priority_above_the_ceiling_is_denied(tmp_path: Path) -> None:
    settings = grpc_settings(access=access(tmp_path / "tokens"))
    async with started(settings) as (address, _), open_channel(address, Credentials(ALICE)) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="priority is -1") as raised:
            await anext(aiter(stub.Generate(generate_pb2.GenerateRequest(text="me first", priority=-1))))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_requests_aims_reach_the_engines_and_those_that_are_tighter_than_the_token_allows_are_denied(
    tmp_path: Path,
) -> None:
    pair = make_pair()
    settings = grpc_settings(access=access(tmp_path / "tokens"))
    async with started(settings, pair.serving) as (address, _), open_channel(address, Credentials(ALICE)) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        too_tight = generate_pb2.GenerateRequest(text="now", slo=generate_pb2.Slo(ttft_ms=99))
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"slo\.ttft_ms is 99; token 'alice' may have 100 and above"
        ) as raised:
            await anext(aiter(stub.Generate(too_tight)))
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        nonsense = generate_pb2.GenerateRequest(text="now", slo=generate_pb2.Slo(itl_ms=-1))
        with pytest.raises(grpc.aio.AioRpcError, match=r"slo\.itl_ms") as raised:
            await anext(aiter(stub.Generate(nonsense)))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = stub.Generate(generate_pb2.GenerateRequest(text="hello", slo=generate_pb2.Slo(ttft_ms=100)))
        producer, _ = await pair.next_requests()
        assert producer.slo == Slo(ttft_s=0.1, itl_s=0.06), "the token has an aim for what the request leaves open"
        call.cancel()
        await asyncio.wait_for(pair.decode.has_aborted.wait(), timeout=60)


async def ask_about_last(address: str, credentials: Credentials | None = None) -> int:
    """How many of the last requests are explained."""
    async with open_channel(address, credentials) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        return len((await stub.Explain(generate_pb2.ExplainRequest(last=5), timeout=60)).records)


async def test_administration_can_have_a_port_of_its_own() -> None:
    async with started(grpc_settings(admin_port=0)) as (address, server):
        error = await failure_of(ask_status(address))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        admin_address = f"127.0.0.1:{server.admin_port}"
        assert await ask_status(admin_address) == "test"
        assert (await failure_of(ask_model(admin_address))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_with_a_port_of_their_own_operators_alone_ask_about_requests_unless_there_are_tokens(
    tmp_path: Path,
) -> None:
    async with started(grpc_settings(admin_port=0)) as (address, server):
        error = await failure_of(ask_about_last(address))
        assert (error.code(), "ingress.admin_port" in str(error.details())) == (grpc.StatusCode.PERMISSION_DENIED, True)
        assert await ask_about_last(f"127.0.0.1:{server.admin_port}") == 0
    async with started(grpc_settings(access(tmp_path / "tokens"), admin_port=0)) as (address, server):
        assert await ask_about_last(address, Credentials(ALICE)) == 0


async def test_certificates_are_used_anew_when_they_change(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = old.certify("server")
    clock = Clock()
    tls = ServerTls(TlsConfig(certificate=files.certificate, key=files.key), clock)
    async with started(grpc_settings(tls=tls)) as (address, _):
        assert await ask_model(address, Credentials(ca=old.root)) == "tiny"
        assert (await failure_of(ask_model(address))).code() is grpc.StatusCode.UNAVAILABLE, "plain text"

        new.certify("server")
        clock.now_s += 2
        assert await ask_model(address, Credentials(ca=new.root)) == "tiny"
        assert (await failure_of(ask_model(address, Credentials(ca=old.root)))).code() is grpc.StatusCode.UNAVAILABLE

        files.key.write_text("half a file")
        clock.now_s += 2
        assert await ask_model(address, Credentials(ca=new.root)) == "tiny"


async def test_mutual_tls_asks_for_a_certificate_of_the_right_authority(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "root"), Authority(tmp_path, "other")
    server, client, stranger = authority.certify("server"), authority.certify("client"), other.certify("stranger")
    tls = ServerTls(TlsConfig(certificate=server.certificate, key=server.key, client_ca=authority.root))
    async with started(grpc_settings(tls=tls)) as (address, _):
        known = Credentials(ca=authority.root, certificate=client.certificate, key=client.key)
        assert await ask_model(address, known) == "tiny"
        for refused in (
            replace(known, certificate=None, key=None),
            replace(known, certificate=stranger.certificate, key=stranger.key),
        ):
            assert (await failure_of(ask_model(address, refused))).code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_do_not_fit_together_are_refused_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "root")
    one, other = authority.certify("one"), authority.certify("other")
    for config in (
        TlsConfig(certificate=one.certificate, key=other.key),
        TlsConfig(certificate=tmp_path / "nothing", key=one.key),
    ):
        with pytest.raises(InvalidConfig, match=r"ingress.tls: cannot be used"):
            ServerTls(config)


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "insecure": True}, True),
        ({"host": "0.0.0.0", "tls": {"certificate": "c", "key": "k"}}, True),
    ],
)
def test_plain_text_beyond_loopback_has_to_be_asked_for(settings: dict[str, Any], is_allowed: bool) -> None:
    if is_allowed:
        IngressConfig.model_validate(settings)
    else:
        with pytest.raises(ValueError, match="beyond loopback, and tls is not set"):
            IngressConfig.model_validate(settings)


def test_ports_of_several_ingresses_must_not_meet() -> None:
    IngressConfig(port=50051, admin_port=50053, count=2)
    IngressConfig(port=0, admin_port=0, count=2)
    with pytest.raises(ValueError, match="keep the ports at least 2 apart"):
        IngressConfig(port=50051, admin_port=50052, count=2)


def test_a_client_does_not_show_its_token_to_the_network() -> None:
    with pytest.raises(InvalidConfig, match=r"would go to example\.org in plain text"):
        Credentials(ALICE).metadata("example.org:50051")
    assert Credentials(ALICE, insecure=True).metadata("example.org:1") == (("authorization", f"Bearer {ALICE}"),)
    assert ALICE not in repr(Credentials(ALICE))


async def test_a_message_that_cannot_be_read_is_the_clients_mistake() -> None:
    async with started(grpc_settings()) as (address, _), grpc.aio.insecure_channel(address) as channel:
        for method in ("GenerateService/Generate", "ModelService/GetModel", "AdminService/Drain"):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/raypd.v1.{method}")
            error = await failure_of(call(b"\x0a\x02\xff\xfe", timeout=60))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, method
