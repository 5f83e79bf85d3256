"""Work past its deadline is dropped wherever it is, by the engine that has it, and its blocks are free afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest, FinishReason, RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from cluster.client import CallFailed, GenerateClient
from cluster.routing.engine_connection import EngineConnection
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import KVTransferParams, TransferRole
from tests.cluster.serving_setup import make_ingress_server
from tests.engine_pair import engine_config
from tests.integration.recovering_cluster import RecoveringCluster, recovering_cluster
from tests.reference import random_prompt

_TIMEOUT_S = 60.0
_MANY_TOKENS = 450
_LEFT_S = 0.2
_TRIES_S = (_LEFT_S, 2.0, 20.0)
"""How much time a request has left, until it has come far enough by then: on a busy machine that may take long."""


class SteppedClock:
    """A wall clock that somebody sets: step_s is what was added to it."""

    def __init__(self) -> None:
        self._unix_s = time.time
        self.step_s = 0.0

    def __call__(self) -> float:
        return self._unix_s() + self.step_s


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    """The wall clock of everything that is built after this fixture."""
    clock = SteppedClock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
async def cluster(checkpoint: Callable[[str], Path]) -> AsyncIterator[RecoveringCluster]:
    """A prefill and a decode engine that run one request at a time."""
    transfer = KVTransferConfig(transport="tcp")
    config = engine_config(checkpoint("llama"), max_num_seqs=1, transfer=transfer)
    async with recovering_cluster(config, ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        yield cluster


def _request(name: str, *, left_s: float | None = _LEFT_S) -> EngineCoreRequest:
    now_s = time.monotonic()
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=random_prompt(40),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=_MANY_TOKENS, ignore_eos=True),
        arrival_time_s=now_s,
        deadline_s=None if left_s is None else now_s + left_s,
    )


def _engine(cluster: RecoveringCluster, engine_id: str) -> EngineConnection:
    return next(e for e in cluster.pool.snapshot() if e.descriptor.engine_id == engine_id)


async def _last(outputs: AsyncIterator[EngineCoreOutput]) -> EngineCoreOutput:
    async with asyncio.timeout(_TIMEOUT_S):
        return [output async for output in outputs][-1]


def _statuses(output: EngineCoreOutput) -> list[RequestStatus]:
    assert (output.finish_reason, output.error) == (FinishReason.ABORT, "deadline exceeded")
    assert output.timings is not None
    return [change.status for change in output.timings.status_changes]


async def _check_that_it_is_dropped(
    engine: EngineConnection, status: RequestStatus, ticket: KVTransferParams | None = None
) -> None:
    """Ask for a request that has this status when it is due. ticket: it is one half of a handoff."""
    statuses: list[RequestStatus] = []
    for number, left_s in enumerate(_TRIES_S):
        own_ticket = ticket and replace(ticket, transfer_id=f"t{number}")
        request = replace(_request(f"r{number}", left_s=left_s), kv_transfer_params=own_ticket)
        statuses = _statuses(await _last(engine.submit(request)))
        if status in statuses:
            break
    assert statuses[-2:] == [status, RequestStatus.FINISHED_ABORTED]


async def test_a_running_request_is_dropped(cluster: RecoveringCluster) -> None:
    # However much time it has, it is not through by then.
    cluster.barriers["decode-0"].pause_s = 2 * max(_TRIES_S) / _MANY_TOKENS
    await _check_that_it_is_dropped(_engine(cluster, "decode-0"), RequestStatus.RUNNING)
    await cluster.until_idle()


async def test_a_request_in_the_queue_is_dropped_and_the_one_before_it_goes_on(cluster: RecoveringCluster) -> None:
    decode = _engine(cluster, "decode-0")
    first = decode.submit(_request("first", left_s=None))
    await anext(first)
    output = await _last(decode.submit(_request("second", left_s=0.01)))
    assert _statuses(output) == [RequestStatus.WAITING, RequestStatus.FINISHED_ABORTED]
    assert (await _last(first)).finish_reason is FinishReason.LENGTH
    await cluster.until_idle()


@pytest.mark.parametrize(
    ("role", "engine_id", "peer_id", "status"),
    [
        (TransferRole.PRODUCER, "prefill-0", "decode-0", RequestStatus.WAITING),
        (TransferRole.CONSUMER, "decode-0", "prefill-0", RequestStatus.WAITING_FOR_REMOTE_KVS),
    ],
)
async def test_a_request_that_waits_for_its_peer_is_dropped(
    cluster: RecoveringCluster, role: TransferRole, engine_id: str, peer_id: str, status: RequestStatus
) -> None:
    engine, peer = _engine(cluster, engine_id), _engine(cluster, peer_id).descriptor
    ticket = KVTransferParams("t", 0, role, peer.kv_address)
    await _check_that_it_is_dropped(engine, status, ticket)
    await cluster.until_idle()


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_a_step_of_the_wall_clock_changes_no_deadline(
    wall_clock: SteppedClock, cluster: RecoveringCluster, step_s: float
) -> None:
    """Forward, nothing that has time left ends; back, what is due ends all the same."""
    decode, peer = _engine(cluster, "decode-0"), _engine(cluster, "prefill-0").descriptor
    patient = decode.submit(_request("patient", left_s=_TIMEOUT_S))
    await anext(patient)
    ticket = KVTransferParams("t", 0, TransferRole.CONSUMER, peer.kv_address)
    due = decode.submit(replace(_request("due"), kv_transfer_params=ticket))
    wall_clock.step_s = step_s
    assert _statuses(await _last(due))[-1] is RequestStatus.FINISHED_ABORTED
    last = await _last(patient)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.timings is not None
    assert 0 <= last.timings.queued_s < _TIMEOUT_S
    assert 0 <= last.timings.prefill_s < _TIMEOUT_S
    await cluster.until_idle()


async def test_a_clients_deadline_passes_through_the_ingress(cluster: RecoveringCluster) -> None:
    server = make_ingress_server(cluster.serving)
    async with GenerateClient(f"127.0.0.1:{await server.start()}") as client:
        answer = client.generate(
            random_prompt(40), temperature=0.0, max_tokens=_MANY_TOKENS, ignore_eos=True, timeout_s=_LEFT_S
        )
        async with aclosing(answer) as responses:
            with pytest.raises(CallFailed) as raised:
                _ = [response async for response in responses]
        assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(_TIMEOUT_S):
            while cluster.serving.num_requests_in_flight:  # noqa: ASYNC110  # the server may hear of it later
                await asyncio.sleep(0.01)
        await cluster.until_idle()
    await server.drain(0)
