"""Refused peers are counted every time and logged seldom."""

from __future__ import annotations

import logging

import pytest

from kv_transfer.errors import NotRaypd, WrongSecret
from kv_transfer.trust.refusals import Refusals


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_every_refusal_counts_and_a_peer_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for port in range(50_000, 50_100):
        refusals.add("session", f"ipv4:127.0.0.1:{port}", WrongSecret("no"))
    refusals.add("session", "ipv4:127.0.0.1:50000", NotRaypd("no"))
    assert dict(refusals.counts) == {"wrong_secret": 100, "not_raypd": 1}
    assert refusals.total == 101
    assert len(caplog.records) == 2
    clock.now_s = 61.0
    refusals.add("session", "ipv4:127.0.0.1:1", WrongSecret("no"))
    assert len(caplog.records) == 3
    assert vars(caplog.records[-1])["peer"] == "ipv4:127.0.0.1"
    assert caplog.records[-1].levelno == logging.WARNING


def test_strangers_from_many_addresses_fill_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for number in range(5000):
        refusals.add("session", f"ipv4:10.0.{number // 256}.{number % 256}:1", WrongSecret("no"))
    assert refusals.total == 5000
    assert len(caplog.records) == 256
    clock.now_s = 61.0
    refusals.add("session", "ipv4:10.9.9.9:1", WrongSecret("no"))
    assert len(caplog.records) == 257
