"""Clients of these tests go to the first of their ingresses, however busy the machine is."""

from __future__ import annotations

import pytest

from cluster.client import known_ingresses


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a client goes to the next ingress where the first one has not connected within 0.25 s."""
    monkeypatch.setattr(known_ingresses, "_HEAD_START_S", 3.0)
