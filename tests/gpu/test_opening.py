"""Links that do not come up, with real NCCL: the deadline holds, and the process goes on."""

from __future__ import annotations

import time

import pytest
import torch

from kv_transfer.errors import LinkLost
from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_device import CudaDevice
from kv_transfer.transports.nccl_library import load_nccl
from tests.gpu.conftest import Site, Spawn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONNECT_TIMEOUT_S = 3.0


class LonelyProducer:
    """Opens a link that nobody joins."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._transport = NcclTransport(load_nccl(), CudaDevice(self._device), pytest.fail, CONNECT_TIMEOUT_S)

    def accept(self) -> tuple[str, float, int]:
        """Accept; returns the report, after how many seconds, and how many initialisations are abandoned by now."""
        pending = self._transport.listen()
        start_s = time.monotonic()
        try:
            pending.accept(CONNECT_TIMEOUT_S)
        except LinkLost as error:
            return str(error), time.monotonic() - start_s, self._transport.num_abandoned
        raise AssertionError("somebody joined")

    def product_is_right(self) -> bool:
        a = torch.ones(256, 256, device=self._device)
        return bool((a @ a).eq(256).all())


def test_a_peer_that_never_joins_costs_no_more_than_the_deadline(sites: list[Site], spawn: Spawn) -> None:
    producer = spawn(sites[0], LonelyProducer)
    for num_abandoned in (1, 2):
        said, elapsed_s, num_abandoned_there = producer.call("accept")
        assert said == "the peer did not join the NCCL communicator within 3 s"
        assert elapsed_s < CONNECT_TIMEOUT_S + 1.0
        assert num_abandoned_there == num_abandoned
        assert producer.call("product_is_right")
