"""An ingress answers everybody else as before and stays as small as it was, whatever clients send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.attacks import connection_attacks, grpc_attacks, http_attacks, observer_attacks
from tests.attacks.callback_times import CallbackReport
from tests.attacks.target import MAX_GROWTH_MIB, Attack, AttackedIngress, Effects, Target
from tests.attacks.victim import Felt
from tests.patience import TEST_S

pytestmark = [pytest.mark.more, pytest.mark.timeout(TEST_S)]

ATTACKS = [
    *grpc_attacks.ATTACKS,
    *connection_attacks.ATTACKS,
    *http_attacks.ATTACKS,
    *observer_attacks.ATTACKS,
]


def parameters(*, is_slow: bool) -> list[ParameterSet]:
    return [pytest.param(attack, id=attack.name) for attack in ATTACKS if attack.is_slow == is_slow]


@pytest.mark.parametrize("attack", parameters(is_slow=False))
async def test_an_attack_is_felt_by_nobody(attack: Attack, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(attack)
    assert effects.mistakes() == [], effects


@pytest.mark.slow
@pytest.mark.parametrize("attack", parameters(is_slow=True))
async def test_a_large_attack_is_felt_by_nobody(attack: Attack, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(attack)
    assert effects.mistakes() == [], effects


async def test_after_all_of_them_the_ingress_is_about_as_large_as_before(ingress: AttackedIngress) -> None:
    async def rest(target: Target) -> None:
        pass

    effects = await ingress.suffer(Attack("none", rest), num_repetitions=1)
    assert effects.mistakes() == []
    assert ingress.rss_mib() - ingress.first_rss_mib < MAX_GROWTH_MIB


UNHARMED = Effects(
    callback=CallbackReport(0.099, "f"),
    rss_mib=(100.0, 340.0, 345.0, 350.0),
    ended=(),
    felt=Felt(num_calls=1, num_messages=1),
)


@pytest.mark.parametrize(
    ("effects", "mistakes"),
    [
        (UNHARMED, []),
        (replace(UNHARMED, callback=CallbackReport(0.101, "f")), ["a callback used 101 ms of CPU time: f"]),
        (replace(UNHARMED, rss_mib=(100.0, 110.0, 120.0, 153.0)), ["memory grew: 100 -> 110 -> 120 -> 153 MiB"]),
        (replace(UNHARMED, rss_mib=(100.0, 110.0, 120.0, 153.0, 118.0, 160.0, 158.0)), []),
        (
            replace(UNHARMED, rss_mib=(100.0, 110.0, 120.0, 130.0, 140.0, 150.0, 160.0)),
            ["memory grew: 100 -> 110 -> 120 -> 130 -> 140 -> 150 -> 160 MiB"],
        ),
        (replace(UNHARMED, rss_mib=(100.0, 357.0, 357.0, 357.0)), ["memory grew: 100 -> 357 -> 357 -> 357 MiB"]),
        (replace(UNHARMED, ended=("the ingress",)), ["the ingress has ended"]),
        (replace(UNHARMED, felt=Felt(["reset"], 1, 1)), ["the victim: reset"]),
        (replace(UNHARMED, felt=Felt(num_calls=1)), ["the victim was not answered at all"]),
    ],
)
def test_what_an_attack_may_not_do_is_found(effects: Effects, mistakes: list[str]) -> None:
    assert effects.mistakes() == mistakes
