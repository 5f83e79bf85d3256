from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.target import AttackedIngress, attacked_ingress


@pytest.fixture(scope="session")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedIngress]:
    """One for all attacks: what one of them leaves behind, the next ones meet."""
    with attacked_ingress(tmp_path_factory.mktemp("attacked")) as ingress:
        yield ingress
