"""Overlays whose engines have several ranks, on Ray nodes of this machine: a pod has one engine, and all its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.client import GenerateClient
from tests.integration.deployment import Deployment, check_that_it_serves
from tests.patience import TEST_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["gpu-xpyd-tp", "rdma"])
async def test_an_engine_of_several_ranks_has_a_pod_of_its_own(overlay: str, tmp_path: Path) -> None:
    with Deployment.started(overlay, tmp_path) as deployment:
        deployment.run(*deployment.submit)
        await check_that_it_serves(deployment.address)
        [prefill], [decode] = deployment.pods.of_group("prefill"), deployment.pods.of_group("decode")
        async with GenerateClient(deployment.address) as client:
            status = await client.status(10)
        assert {(engine.engine_id, engine.node) for engine in status.engines} == {
            ("prefill-0", prefill.address),
            ("decode-0", decode.address),
        }
        assert deployment.run(*deployment.raypd("stop")) == "stopped\n"
        deployment.wait_until_gone()
