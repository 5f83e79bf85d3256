from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.two_hosts import NoNamespaces
from tests.hosts.network import Cable, bridged
from tests.hosts.ray_hosts import free_directory
from tests.hosts.served import Served, served_on


@pytest.fixture(scope="package")
def cables() -> Iterator[tuple[Cable, ...]]:
    """The networks of four hosts."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(bridged(4))
        except NoNamespaces as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


@pytest.fixture(scope="module")
def served(
    cables: tuple[Cable, ...], checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A prefill engine on one host, two decode engines on two others, the driver on the head's."""
    directory = free_directory()
    with served_on(cables, directory, checkpoint("llama"), tmp_path_factory.mktemp("served")) as started:
        yield started
