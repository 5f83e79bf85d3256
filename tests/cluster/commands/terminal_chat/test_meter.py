"""TTFT and TPOT as an answer's reader sees them."""

from __future__ import annotations

from cluster.commands.terminal_chat.meter import Meter


def test_the_first_token_and_the_gaps_after_it_are_timed() -> None:
    meter = Meter(asked_s=10.0)
    assert meter.text() == "no token yet"
    meter.count(0, 10.1)
    meter.count(1, 10.25)
    assert meter.text() == "TTFT 250 ms · 1 token"
    meter.count(3, 10.35)
    meter.count(1, 10.65)
    assert meter.text() == "TTFT 250 ms · TPOT 100.0 ms · 5 tokens"
