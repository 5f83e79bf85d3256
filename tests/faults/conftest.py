from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cluster.routing.engine_connection import EngineRole
from tests.faults.engine_child import Place
from tests.faults.engine_house import EngineHouse
from tests.faults.live_engines import LiveEngines
from tests.faults.two_hosts import NoNamespaces, TwoHosts, two_hosts


@pytest.fixture(scope="package")
def house() -> Iterator[EngineHouse]:
    kept = EngineHouse()
    yield kept
    kept.end()


@pytest.fixture(scope="package")
def hosts() -> Iterator[TwoHosts]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except NoNamespaces as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


@pytest.fixture(scope="package")
def house_on_hosts(hosts: TwoHosts) -> Iterator[EngineHouse]:
    """Its engines are gone before their hosts are."""
    del hosts
    kept = EngineHouse()
    yield kept
    kept.end()


@pytest.fixture
async def engines_on_hosts(
    hosts: TwoHosts, house_on_hosts: EngineHouse, checkpoint: Callable[[str], Path]
) -> AsyncIterator[LiveEngines]:
    """Prefill engines on the one host, decode engines on the other. Their pools could be shared within a host."""
    prefill, decode = (Place(host, name) for host, name in zip(hosts.hosts, hosts.namespaces, strict=True))
    place_of = {EngineRole.PREFILL: prefill, EngineRole.DECODE: decode}
    async with LiveEngines(house_on_hosts, checkpoint("llama"), is_pool_shared=True, place_of=place_of) as started:
        yield started


@pytest.fixture
async def tcp_engines(house: EngineHouse, checkpoint: Callable[[str], Path]) -> AsyncIterator[LiveEngines]:
    """No engine yet; those that the test starts are joined by TCP."""
    async with LiveEngines(house, checkpoint("llama")) as started:
        yield started


@pytest.fixture
async def sharing_engines(house: EngineHouse, checkpoint: Callable[[str], Path]) -> AsyncIterator[LiveEngines]:
    """Engines that the test starts; they are joined by shared memory."""
    async with LiveEngines(house, checkpoint("llama"), is_pool_shared=True) as started:
        yield started


@pytest.fixture(
    params=[
        pytest.param("tcp_engines", id="tcp"),
        pytest.param("sharing_engines", id="shared memory"),
        pytest.param("engines_on_hosts", id="two hosts", marks=pytest.mark.slow),
    ]
)
def engines(request: pytest.FixtureRequest) -> LiveEngines:
    """Every way that engines can be joined."""
    started = request.getfixturevalue(request.param)
    assert isinstance(started, LiveEngines)
    return started
