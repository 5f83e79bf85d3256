"""Images that unfold are refused, or decoded by a process of their own, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attacks.image_attacks import ATTACKS, FAMILY
from tests.attacks.ingress_settings import IngressSettings
from tests.attacks.target import MAX_GROWTH_MIB, Attack, AttackedIngress, attacked_ingress
from tests.patience import TEST_S

pytestmark = [pytest.mark.more, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Iterator[AttackedIngress]:
    """An ingress of a model that takes images."""
    settings = IngressSettings(model=checkpoint(FAMILY))
    with attacked_ingress(tmp_path_factory.mktemp("attacked"), settings) as ingress:
        yield ingress


@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in ATTACKS])
async def test_an_image_is_felt_by_nobody(attack: Attack, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(attack)
    assert effects.mistakes() == [], effects
    assert ingress.rss_mib() - ingress.first_rss_mib < MAX_GROWTH_MIB
