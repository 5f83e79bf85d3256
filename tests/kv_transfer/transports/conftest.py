from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kv_transfer.transports.fake_nccl import FakeNetwork


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    """Whatever the test does to it, nobody may do what NCCL leaves undefined."""
    network = FakeNetwork()
    yield network
    violations = list(network.violations)
    network.close()
    assert violations == []
