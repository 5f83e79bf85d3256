"""Answers that nobody reads: only a few of the large ones are made, and a client that does not read is cut off.

Tests of cluster/api/grpc/interceptor.py.
"""

from __future__ import annotations

import asyncio
import struct

import pytest

from cluster.access.caller import Caller
from cluster.api.grpc.interceptor import MAX_LARGE_ANSWERS
from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.api.shared.explainer import Explainer, Explanation
from cluster.client.channel import open_channel
from tests.attacks.raw_http2 import END_STREAM, Connection, frame, message_head
from tests.attacks.target import Target
from tests.cluster.api.grpc.test_access import started
from tests.cluster.routing.record_samples import record
from tests.cluster.serving_setup import grpc_settings

EXPLAIN = "/raypd.v1.GenerateService/Explain"
NO_WINDOW = struct.pack(">HI", 4, 0)
"""The setting of a client that takes no data on any stream."""


class Explanations:
    """Counts how many were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_asked = 0
        self._asked = asyncio.Condition()

        async def explain_last(explainer: Explainer, last: int, tenant: str | None, caller: Caller) -> Explanation:
            async with self._asked:
                self.num_asked += 1
                self._asked.notify_all()
            return Explanation((record(),) * last)

        monkeypatch.setattr(Explainer, "explain_last", explain_last)

    async def until(self, num_asked: int) -> None:
        async with asyncio.timeout(60), self._asked:
            await self._asked.wait_for(lambda: self.num_asked >= num_asked)


async def ask_without_reading(address: str, num_calls: int) -> Connection:
    connection = await Connection.open(Target(int(address.rpartition(":")[2]), 0, "", ""), NO_WINDOW)
    request = generate_pb2.ExplainRequest(last=100).SerializeToString()
    for _ in range(num_calls):
        stream = connection.begin(EXPLAIN)
        connection.write(frame(0, END_STREAM, stream, message_head(len(request)) + request))
    await connection.drain()
    return connection


async def test_a_few_large_answers_are_made_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    explanations = Explanations(monkeypatch)
    async with started(grpc_settings()) as (address, _):
        connection = await ask_without_reading(address, 40)
        await explanations.until(MAX_LARGE_ANSWERS)
        async with open_channel(address) as channel:
            waiting = generate_pb2_grpc.GenerateServiceStub(channel).Explain(generate_pb2.ExplainRequest(last=1))
            await asyncio.sleep(0.2)  # Time in which further answers could be made.
            assert explanations.num_asked == MAX_LARGE_ANSWERS
            await connection.close()
            assert len((await waiting).records) == 1, "those who left hold nobody up"


async def test_a_client_that_does_not_read_a_single_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    explanations = Explanations(monkeypatch)
    async with started(grpc_settings(slow_reader_timeout_s=0.1)) as (address, _):
        connection = await ask_without_reading(address, 3 * MAX_LARGE_ANSWERS)
        await explanations.until(3 * MAX_LARGE_ANSWERS)
        await connection.close()
