from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.two_hosts import NoNamespaces
from tests.hosts.network import Cable, bridged
from tests.hosts.served import Layout, Served, served_on


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
def serving(
    cables: tuple[Cable, ...], checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Served]]:
    """served_on() but for the layout, and settings if any."""
    model, directory = checkpoint("llama"), tmp_path_factory.mktemp("served")

    def on(layout: Layout, **settings: Mapping[str, str]) -> AbstractContextManager[Served]:
        return served_on(cables, layout, model, directory, **settings)

    return on
