"""The planner's part of `raypd status`."""

from __future__ import annotations

from rich.console import Console, Group

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.commands.status.plan_table import render_plan


def _text(status: admin_pb2.GetStatusResponse) -> str:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(Group(*render_plan(status)))
    return shown.get()


def test_the_status_shows_target_reason_forecast_and_error() -> None:
    status = admin_pb2.GetStatusResponse(
        planner=admin_pb2.PlannerStatus(
            mode="act",
            age_seconds=3.0,
            action="change",
            current=admin_pb2.EngineCounts(prefill=2, decode=1),
            target=admin_pb2.EngineCounts(prefill=1, decode=2),
            steps="prefill-0 becomes decode",
            reason="96% of requests would meet the aims [with 1P2D]",
            findings=["the aim of 5 ms is not attainable"],
            prefill_work=0.5,
            decode_work=1.25,
            prefill_work_high=0.75,
            decode_work_high=1.5,
            forecast_error=-0.125,
            least_engines=3,
        )
    )
    text = _text(status)
    assert "planner: act, change" in text
    assert "0.50 (≤ 0.75)" in text
    assert "1.25 (≤ 1.50)" in text
    assert "-12%" in text
    assert "reason: 96% of requests would meet the aims [with 1P2D]" in text
    assert "steps: prefill-0 becomes decode" in text
    assert "the aim of 5 ms is not attainable" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["now"], ["target"])]
    assert [row[:4] for row in rows] == [["now", "2", "1", "0"], ["target", "1", "2", "0"]]


def test_without_a_planner_nothing_is_shown() -> None:
    assert render_plan(admin_pb2.GetStatusResponse()) == []
