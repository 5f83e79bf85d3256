"""A decode engine's host behind a slow, a narrow, and a lossy wire: everything takes longer, nothing else happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import pytest

from cluster.client import GenerateClient
from tests.faults.two_hosts import NoNamespaces
from tests.hosts.load import NUM_TOKENS, NUM_WORKERS, load
from tests.hosts.network import Cable
from tests.hosts.served import FULL, Served
from tests.hosts.slow_wire import SlowCable, Wire, slowed
from tests.hosts.watching import is_idle, states, status_becomes
from tests.patience import TEST_S

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.more, pytest.mark.alone, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Slowed:
    served: Served
    cable: SlowCable


@pytest.fixture(scope="module")
def slow(cables: tuple[Cable, ...], serving: Callable[..., AbstractContextManager[Served]]) -> Iterator[_Slowed]:
    with ExitStack() as stack:
        try:
            cable = stack.enter_context(slowed(cables[2]))
        except NoNamespaces as error:
            pytest.skip(f"no slow wire here: {error}")
        yield _Slowed(stack.enter_context(serving(FULL)), cable)


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(Wire(), id="as it is"),
        pytest.param(Wire(delay_s=0.05), id="50 ms each way"),
        pytest.param(Wire(delay_s=0.05, rate=250_000), id="50 ms each way and 2 Mbit per second"),
        pytest.param(Wire(loss=0.01), id="1 % lost"),
        pytest.param(Wire(delay_s=0.05, loss=0.01), id="50 ms each way and 1 % lost"),
    ],
)
async def test_a_bad_wire_costs_time_only(slow: _Slowed, wire: Wire) -> None:
    served = slow.served
    async with GenerateClient(served.address) as client:
        before = await client.status()
        slow.cable.become(wire)
        try:
            async with load(client, served.directory) as seen:
                await seen.flows(2 * NUM_WORKERS * NUM_TOKENS)
        finally:
            slow.cable.become(Wire())
        logger.info("%s: %s", wire, seen.report())
        status = await status_becomes(client, is_idle, _IDLE_TIMEOUT_S)
    assert states(status) == states(before)
    [decode] = [engine for engine in status.engines if served.host_at(engine.address) is served.ray.hosts[2]]
    [decode_before] = [engine for engine in before.engines if engine.engine_id == decode.engine_id]
    assert decode.transfers.failed == 0
    assert decode.transfers.completed >= decode_before.transfers.completed + NUM_WORKERS // 2
    logger.info("a transfer took %.3f s in the mean", decode.transfers.mean_transfer_seconds)
