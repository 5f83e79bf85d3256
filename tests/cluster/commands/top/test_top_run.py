"""`raypd top` at a fake ingress.

Tests of cluster/commands/top/top_run.py, cluster/commands/top/top_command.py.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
from rich.console import Console

from cluster.api.protos.raypd.v1 import admin_pb2, generate_pb2
from cluster.client import CallFailed
from cluster.commands.top import top_run
from cluster.commands.top.top_run import show_top
from cluster.errors import InvalidConfig
from cluster.routing.request_record import RequestRecord
from tests.cluster.commands.top.statuses import engine, status

RECORDS = (("ended-1", "stop"), ("live-1", None))


class _Client:
    """An ingress, and what it was asked to change."""

    def __init__(self, *, fails: bool = False, keeps_no_records: bool = False) -> None:
        self.num_statuses = 0
        self.changes: list[tuple[str, ...]] = []
        self.has_changed = asyncio.Event()
        self.has_been_asked = asyncio.Event()
        self._fails = fails
        self._keeps_no_records = keeps_no_records
        self.num_asked = 0

    def __call__(self, address: str) -> _Client:
        return self

    async def __aenter__(self) -> _Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def status(self, timeout_s: float) -> admin_pb2.GetStatusResponse:
        self.num_statuses += 1
        if self.num_statuses == 3:
            self.has_been_asked.set()
        if self._fails and self.num_statuses > 1:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "gone for now")
        return status(engine("decode-0", output_tokens=self.num_statuses * 100))

    async def explain(self, *, last: int, timeout_s: float) -> generate_pb2.ExplainResponse:
        self.num_asked = last
        if self._keeps_no_records:
            raise CallFailed(grpc.StatusCode.FAILED_PRECONDITION, "no records are kept")
        ended, live = (RequestRecord(name, "", "ingress-0", 10.0, outcome) for name, outcome in RECORDS)
        return generate_pb2.ExplainResponse(records=[ended.to_json().decode(), live.to_json().decode()])

    async def drain(self, engine_id: str, timeout_s: float) -> None:
        self.changes.append(("drain", engine_id))
        self.has_changed.set()

    async def set_role(self, engine_id: str, role: str, timeout_s: float) -> None:
        self.changes.append(("set_role", engine_id, role))
        self.has_changed.set()
        raise CallFailed(grpc.StatusCode.NOT_FOUND, "no such engine")


def _console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, width=120, height=30, force_terminal=is_terminal), written


async def test_once_prints_the_screen_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    monkeypatch.setattr(top_run, "GenerateClient", client)
    console, written = _console(is_terminal=False)
    await show_top("a:1", console, interval_s=0.06, timeout_s=1.0, is_once=True)
    assert client.num_statuses == 2
    assert "decode-0" in written.getvalue()
    assert "ended-1" in written.getvalue()
    assert "live-1" not in written.getvalue(), "only ended requests are finished"
    assert "- output tok/s" not in written.getvalue(), "two statuses have rates"


async def test_a_cluster_that_keeps_no_records_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_run, "GenerateClient", _Client(keeps_no_records=True))
    console, written = _console(is_terminal=False)
    await show_top("a:1", console, interval_s=0.06, timeout_s=1.0, is_once=True)
    assert "no finished requests: FAILED_PRECONDITION: no records are kept" in written.getvalue()


async def test_without_a_terminal_it_is_refused_with_what_to_do() -> None:
    console, _ = _console(is_terminal=False)
    with pytest.raises(InvalidConfig, match="--once"):
        await show_top("a:1", console, interval_s=1.0, timeout_s=1.0, is_once=False)


class _Keyboard:
    """Keys that a test presses."""

    def __init__(self) -> None:
        self.press: Callable[[str], None] = lambda key: None

    @contextmanager
    def __call__(self, on_key: Callable[[str], None]) -> Iterator[None]:
        self.press = on_key
        yield


async def _run(monkeypatch: pytest.MonkeyPatch, client: _Client, *keys: str) -> str:
    """Press keys, wait for the change that they ask for, and quit."""
    keyboard = _Keyboard()
    monkeypatch.setattr(top_run, "GenerateClient", client)
    monkeypatch.setattr(top_run, "pressed_keys", keyboard)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    console, written = _console(is_terminal=True)
    running = asyncio.create_task(show_top("a:1", console, interval_s=0.01, timeout_s=1.0, is_once=False))
    await asyncio.wait_for(client.has_been_asked.wait(), 60)
    for key in keys:
        keyboard.press(key)
    if keys:
        await asyncio.wait_for(client.has_changed.wait(), 60)
        await asyncio.sleep(0)
    keyboard.press("q")
    await asyncio.wait_for(running, 60)
    return written.getvalue()


async def test_a_confirmed_drain_is_done_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    shown = await _run(monkeypatch, client, "d", "y")
    assert client.changes == [("drain", "decode-0")]
    assert "done: drain decode-0" in shown


async def test_a_change_that_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    shown = await _run(monkeypatch, client, "r", "p", "y")
    assert client.changes == [("set_role", "decode-0", "prefill")]
    assert "failed: let decode-0 serve as prefill" in shown


async def test_an_ingress_that_is_away_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no newer status: " in await _run(monkeypatch, _Client(fails=True))
