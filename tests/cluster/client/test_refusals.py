"""Ingresses that are full, gone or silent, before an answer has begun.

Tests of cluster/client/single_calls.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token, make_token
from cluster.client import CallFailed, Credentials, GenerateClient, known_ingresses
from cluster.client.retry_limits import RetryPolicy
from tests.cluster.client.scripted_ingress import ScriptedIngress
from tests.cluster.serving_setup import grpc_settings, make_ingress_server, make_pair
from tests.ports import free_port

HEAD_START_S = known_ingresses._HEAD_START_S
NOBODY = "127.0.0.1:1"
_TIMEOUT_S = 60.0


@pytest.fixture
def first() -> Iterator[ScriptedIngress]:
    with ScriptedIngress().serving() as ingress:
        yield ingress


@pytest.fixture
def second() -> Iterator[ScriptedIngress]:
    with ScriptedIngress().serving() as ingress:
        yield ingress


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_full_ingress_is_asked_again_when_it_said(first: ScriptedIngress) -> None:
    first.num_refusals, first.retry_delay_s = 2, 0.2
    async with GenerateClient(first.address) as client:
        began_s = time.monotonic()
        assert (await client.complete("x")).text == "hello"
    assert time.monotonic() - began_s >= 0.4
    assert len(first.requests) == 3


async def test_a_call_that_reads_is_made_again_when_a_full_ingress_said(tmp_path: Path) -> None:
    secret = make_token()
    entry = {"name": "t", "sha256": hash_token(secret), "requests_per_s": 5, "burst_s": 0.2}
    (tmp_path / "tokens").write_text(yaml.safe_dump({"tokens": [entry]}))
    settings = grpc_settings(access=AccessControl(Tokens(tmp_path / "tokens")))
    server = make_ingress_server(make_pair().serving, settings=settings)
    address, credentials = f"127.0.0.1:{await server.start()}", Credentials(secret)
    async with GenerateClient(address, credentials=credentials) as client:
        began_s = time.monotonic()
        for _ in range(3):
            assert await client.tokenize("a") == [97]
    assert time.monotonic() - began_s >= 0.35
    async with GenerateClient(address, credentials=credentials, overload_timeout_s=0) as client:
        with pytest.raises(CallFailed, match="at its limit of 5 requests/s") as raised:
            # So many that a busy machine, too, makes some of them within the 0.2 s of another one.
            await asyncio.gather(*(client.tokenize("a") for _ in range(20)))
    assert raised.value.retry_delay_s
    await server.drain(0)


async def test_of_two_full_ingresses_the_one_that_is_free_first_is_asked(
    first: ScriptedIngress, second: ScriptedIngress
) -> None:
    first.num_refusals, first.retry_delay_s = 1, 600.0
    second.num_refusals, second.retry_delay_s = 1, 0.1
    async with GenerateClient([first.address, second.address], overload_timeout_s=1000.0) as client:
        assert (await asyncio.wait_for(client.complete("x"), _TIMEOUT_S)).text == "hello"
    assert (len(first.requests), len(second.requests)) == (1, 2)


@pytest.mark.parametrize(("overload_timeout_s", "timeout_s"), [(0.0, None), (100.0, None), (600.0, 100.0)])
async def test_a_delay_that_is_longer_than_the_patience_is_not_waited_for(
    overload_timeout_s: float, timeout_s: float | None, first: ScriptedIngress
) -> None:
    first.num_refusals, first.retry_delay_s = 1, 120.0
    async with GenerateClient([first.address, NOBODY], overload_timeout_s=overload_timeout_s) as client:
        began_s = time.monotonic()
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED") as raised:
            await client.complete("x", timeout_s=timeout_s)
    assert time.monotonic() - began_s < 60.0
    assert raised.value.retry_delay_s == 120.0


async def test_a_request_that_may_not_be_repeated_is_not(first: ScriptedIngress) -> None:
    first.num_refusals = 1
    async with GenerateClient(first.address) as client:
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED"):
            await client.complete("x", resume=False)


async def test_the_callers_deadline_travels_with_every_call(first: ScriptedIngress) -> None:
    first.num_refusals, first.retry_delay_s = 1, 0.2
    async with GenerateClient(first.address) as client:
        await client.complete("x", timeout_s=90.0)
    before, after = first.time_left_s
    assert before is not None
    assert after is not None
    # gRPC rounds up what it tells a server: to a second, this far from the end.
    assert (30.0 < before <= 91.0, 30.0 < after <= 91.0) == (True, True)


async def test_silent_addresses_take_no_longer_than_the_caller_has(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_ingresses, "_HEAD_START_S", HEAD_START_S)
    monkeypatch.setattr(known_ingresses, "_CONNECT_TIMEOUT_S", 60.0)
    async with GenerateClient([silent] * 4) as client:
        began_s = time.monotonic()
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await client.status(timeout_s=0.5)
    assert time.monotonic() - began_s < 30.0


async def test_an_ingress_behind_silent_ones_is_found_soon(
    silent: str, first: ScriptedIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_ingresses, "_HEAD_START_S", HEAD_START_S)
    monkeypatch.setattr(known_ingresses, "_CONNECT_TIMEOUT_S", 60.0)
    async with GenerateClient([silent, silent, first.address]) as client:
        began_s = time.monotonic()
        assert (await client.complete("x")).text == "hello"
    assert time.monotonic() - began_s < 30.0


async def test_requests_are_spread_if_that_is_wanted(first: ScriptedIngress, second: ScriptedIngress) -> None:
    async with GenerateClient([first.address, second.address], spread=True) as client:
        await client.complete_many(["x"] * 10)
    assert (len(first.requests), len(second.requests)) == (5, 5)


async def test_who_asks_what_changes_nothing_is_answered_by_another_ingress(
    first: ScriptedIngress, second: ScriptedIngress
) -> None:
    async with GenerateClient([first.address, second.address]) as client:
        assert (await client.status()).model == f"scripted at {first.address}"
        await asyncio.to_thread(first.kill)
        assert (await client.status()).model == f"scripted at {second.address}"


async def test_an_ingress_that_was_away_is_tried_again_before_a_new_request_fails(first: ScriptedIngress) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with GenerateClient([address, first.address]) as client:
        assert (await client.complete("x")).text == "hello", "the other one"
        back = ScriptedIngress(address=address)
        with back.serving():
            await asyncio.to_thread(first.kill)
            assert (await client.complete("x")).text == "hello"
    assert len(back.requests) == 1


async def test_closing_the_client_ends_its_streams(first: ScriptedIngress) -> None:
    first.hold_after = 1
    client = GenerateClient(first.address)
    await client.open()
    reading = asyncio.create_task(client.complete("x"))
    await asyncio.to_thread(first.is_held.wait, _TIMEOUT_S)
    await client.close()
    with pytest.raises(CallFailed, match="CANCELLED") as raised:
        await asyncio.wait_for(reading, _TIMEOUT_S)
    assert raised.value.code is grpc.StatusCode.CANCELLED
    assert len(first.requests) == 1


def test_the_waits_are_those_that_are_documented() -> None:
    assert RetryPolicy() == RetryPolicy(recovery_timeout_s=60.0, overload_timeout_s=30.0)
