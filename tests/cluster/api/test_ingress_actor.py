"""Tests of cluster/api/shared/ports.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from actors.model_facts import ModelFacts
from cluster.api.ingress_actor import IngressActor
from cluster.api.shared.ports import IngressPorts
from cluster.config import ClusterConfig
from cluster.settings.ingress import IngressConfig
from tests.kv_transfer.connected_workers import LAYOUT
from tests.trusted import material

_DEMO_MODEL = ModelFacts(4096, 4096, (2,), LAYOUT)


@pytest.fixture
def middle_per_full_before() -> Iterator[int]:
    """How many of the middle generation there are to a full one; restored afterwards."""
    before = gc.get_threshold()
    yield before[2]
    gc.set_threshold(*before)


async def test_no_long_collection_stops_the_streams_of_an_open_ingress(middle_per_full_before: int) -> None:
    left_out_before = gc.get_freeze_count()
    actor = IngressActor(ClusterConfig(ingress=IngressConfig(port=0)), "nobody", 0, 1)
    await actor.use_trust(material())
    await actor.use_ports(IngressPorts(0, 0))
    await actor.start(_DEMO_MODEL)
    try:
        assert gc.get_freeze_count() > left_out_before
        assert gc.get_threshold()[2] >= 100 * middle_per_full_before
    finally:
        await actor.drain(0)
