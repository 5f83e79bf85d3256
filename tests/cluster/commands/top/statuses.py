"""Answers of GetStatus for tests of `raypd top`, and its screen as text."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.top.top_screen import render
from cluster.commands.top.top_state import TopState


def engine(engine_id: str, **load: int) -> admin_pb2.EngineStatus:
    """An engine whose role is in its id, with counters that came just now."""
    counts = {"blocks": 100, "free_blocks": 50, **load}
    role = engine_id.split("-")[0]
    return admin_pb2.EngineStatus(
        engine_id=engine_id, incarnation=1, role=role, state="ready", load=admin_pb2.EngineLoad(**counts)
    )


def status(*engines: admin_pb2.EngineStatus, **fields: object) -> admin_pb2.GetStatusResponse:
    """A status of these engines; of a pair that idles if none is given."""
    given = engines or (engine("prefill-0"), engine("decode-0"))
    return admin_pb2.GetStatusResponse(model="tiny", engines=given, **fields)  # type: ignore[arg-type]  # its fields


def request(request_id: str, age_s: float, phase: str = "decode") -> admin_pb2.RequestInFlight:
    """A request in flight."""
    return admin_pb2.RequestInFlight(
        request_id=request_id, age_seconds=age_s, phase=phase, prefill_engine="prefill-0", decode_engine="decode-0"
    )


def shown(state: TopState, width: int = 150, height: int = 60) -> str:
    """Return the screen as text."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(state, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
