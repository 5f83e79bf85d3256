"""`raypd drain --node --wait`, as a pod's preStop hook calls it: it returns once everything on the node has ended.

Tests of cluster/commands/update_progress.py.
"""

from __future__ import annotations

import asyncio
from io import StringIO
from typing import Any, Self

import grpc
import pytest
from rich.console import Console

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed
from cluster.commands import administration as admin_commands
from cluster.commands import update_progress
from cluster.errors import NotDoneInTime

_HERE, _ELSEWHERE = "127.0.0.1", "127.0.0.2"


class _Port:
    """Stands for an ingress's port."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        self._server = await asyncio.start_server(lambda _, writer: writer.close(), _HERE, 0)
        return f"{_HERE}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        assert self._server is not None
        self._server.close()


class _Client:
    """Stands for GenerateClient; each answer about the cluster is the next of `answers`, the last one for good."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self.num_asked = 0
        self.drained: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def status(self, timeout_s: float) -> admin_pb2.GetStatusResponse:
        answer = self._answers[min(self.num_asked, len(self._answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, admin_pb2.GetStatusResponse)
        return answer

    async def drain_node(self, node: str, timeout_s: float) -> list[str]:
        self.drained.append(node)
        engines = self._answers[0].engines
        return [engine.engine_id for engine in engines if engine.node == node]


def _status(state: str) -> admin_pb2.GetStatusResponse:
    engines = [
        admin_pb2.EngineStatus(engine_id="decode-0", incarnation=7, state=state, node=_HERE),
        admin_pb2.EngineStatus(engine_id="decode-1", incarnation=3, state="ready", node=_ELSEWHERE),
    ]
    return admin_pb2.GetStatusResponse(engines=engines)


async def _drain(monkeypatch: pytest.MonkeyPatch, client: _Client, wait_s: float) -> str:
    monkeypatch.setattr(admin_commands, "GenerateClient", lambda address: client)
    monkeypatch.setattr(admin_commands, "_POLL_INTERVAL_S", 0.001)
    output = StringIO()
    console = Console(file=output, width=200)
    await admin_commands.drain_node("an-ingress:1", console, _HERE, wait_s=wait_s, timeout_s=1)
    return output.getvalue()


async def test_it_waits_for_the_nodes_engines_even_while_the_ingress_that_it_asks_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = CallFailed(grpc.StatusCode.UNAVAILABLE, "connection refused")
    client = _Client([_status("ready"), _status("draining"), _status("draining"), gone, _status("starting")])

    said = await _drain(monkeypatch, client, 60)

    assert said == f"{_HERE} gets no new work; engines and ingresses that drain there: decode-0\ndone\n"
    assert (client.drained, client.num_asked) == ([_HERE], 5)


async def test_it_waits_until_the_nodes_ingress_has_closed_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _Port()
    address = await port.open()
    ingress = admin_pb2.IngressStatus(number=0, state="ready", address=address, node=_HERE)
    client = _Client([admin_pb2.GetStatusResponse(ingresses=[ingress])])

    with pytest.raises(NotDoneInTime, match=f"the drain of the ingress at {address}"):
        await _drain(monkeypatch, client, 0.05)
    port.close()

    assert (await _drain(monkeypatch, client, 60)).endswith(f"that drain there: {address}\ndone\n")


async def test_a_refusal_is_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CallFailed(grpc.StatusCode.PERMISSION_DENIED, "no")
    client = _Client([_status("ready"), _status("draining"), refused])

    with pytest.raises(CallFailed, match="PERMISSION_DENIED"):
        await _drain(monkeypatch, client, 60)


class _UpdatedClient(_Client):
    async def update(self, model: str, timeout_s: float) -> int:
        return 2


def _engines(first: tuple[str, int], second: tuple[str, int], update: str = "") -> admin_pb2.GetStatusResponse:
    engines = [
        admin_pb2.EngineStatus(
            engine_id=f"decode-{number}",
            state=state,
            model_version=version,
            last_error="it lacks 1 GPU" if state == "pending" else "",
        )
        for number, (state, version) in enumerate([first, second])
    ]
    return admin_pb2.GetStatusResponse(engines=engines, update=update)


async def _update(
    monkeypatch: pytest.MonkeyPatch, answers: list[admin_pb2.GetStatusResponse], wait_s: float = 60
) -> str:
    monkeypatch.setattr(admin_commands, "GenerateClient", lambda address: _UpdatedClient(answers))
    monkeypatch.setattr(admin_commands, "_POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(update_progress, "_NO_PLACE_TIMEOUT_S", 0.05)
    output = StringIO()
    console = Console(file=output, width=200)
    await admin_commands.update("an-ingress:1", console, "/new", wait_s=wait_s, timeout_s=1)
    return output.getvalue()


async def test_an_update_is_done_when_every_engine_serves_the_new_model(monkeypatch: pytest.MonkeyPatch) -> None:
    half = "1 of 2 engines serve model version 2"
    answers = [
        _engines(("ready", 1), ("ready", 1), "0 of 2 engines serve model version 2"),
        _engines(("ready", 2), ("ready", 1), half),
        _engines(("ready", 2), ("ready", 1), half),
        _engines(("ready", 2), ("ready", 2)),
    ]

    lines = (await _update(monkeypatch, answers)).splitlines()

    assert lines[1:] == ["0 of 2 engines serve model version 2", half, "done"]


async def test_an_update_does_not_wait_for_ever_for_an_engine_that_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = await _update(monkeypatch, [_engines(("ready", 2), ("pending", 2))])

    assert said.endswith("done, except for engines without room to run: decode-1 (pending: it lacks 1 GPU)\n")


async def test_an_update_waits_for_an_engine_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotDoneInTime, match=r"version 2 was not done .*, and waits for decode-1 \(starting\)"):
        await _update(monkeypatch, [_engines(("ready", 2), ("starting", 2))], wait_s=0.2)


async def test_an_update_that_is_held_up_says_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = _engines(("ready", 1), ("pending", 2), "0 of 2 engines serve model version 2; …: decode-1")
    with pytest.raises(
        NotDoneInTime, match=r"waits for decode-0 \(it serves version 1\), decode-1 \(pending: it lacks"
    ):
        await _update(monkeypatch, [held_up], wait_s=0.2)
