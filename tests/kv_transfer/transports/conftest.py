from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer.transports import tcp
from tests.kv_transfer.transports.fake_nccl import FakeNetwork


@pytest.fixture
def patient_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end takes another way, or gives the other one up, because a busy machine lets it wait."""
    for name in ("_GREETING_TIMEOUT_S", "PROOF_TIMEOUT_S"):
        monkeypatch.setattr(tcp, name, 60.0)


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    """A network on which nobody may do what NCCL leaves undefined, whatever the test does to it."""
    network = FakeNetwork()
    yield network
    violations = list(network.violations)
    network.close()
    assert violations == []
