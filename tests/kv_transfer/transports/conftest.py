from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kv_transfer.transports.fake_nccl import FakeNetwork


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    """A network on which nobody may do what NCCL leaves undefined, whatever the test does to it."""
    network = FakeNetwork()
    yield network
    violations = list(network.violations)
    network.close()
    assert violations == []
