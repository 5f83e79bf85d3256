from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.serve.cluster import config
from tests.integration.served import ServeProcess


@pytest.fixture(scope="package")
def serve_process(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    process = ServeProcess(config(checkpoint("llama")), tmp_path_factory.mktemp("serve"))
    try:
        yield process
        if process.is_alive:
            assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


@pytest.fixture(scope="package")
def served(serve_process: ServeProcess) -> str:
    """The first ingress's host:port for gRPC."""
    return serve_process.wait_until_ready()
