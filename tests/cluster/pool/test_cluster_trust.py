"""The cluster's secret as the controller keeps it: from the start, over its own death, through a replacement.

Tests of cluster/pool/trust_calls.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import SecretIsInFile
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.trust_calls import find_trust, give_trust, spread_trust
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.cluster.pool.fake_ray import UNAVAILABLE, FakeActor


class Drawing:
    """Draws known secrets, at known times."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> TrustMaterial:
        self.number += 1
        return TrustMaterial(100 * self.number, (bytes([self.number]) * 32,))


def secret(number: int) -> bytes:
    return bytes([number]) * 32


def new_trust() -> ClusterTrust:
    trust = ClusterTrust(None, Drawing())
    trust.begin()
    return trust


class Process:
    """The object behind an engine's or an ingress's actor."""

    def __init__(self, material: TrustMaterial | None = None) -> None:
        self.trust = Trust(material)

    async def use_trust(self, material: TrustMaterial) -> int:
        self.trust.use(material)
        return self.trust.settled_generation

    async def reveal_trust(self) -> TrustMaterial | None:
        return self.trust.material


def processes(*given: TrustMaterial | None) -> list[FakeActor]:
    return [FakeActor(Process(material)) for material in given]


def accepted(actor: FakeActor) -> tuple[bytes, ...]:
    process: Any = actor.thing
    return () if process.trust.material is None else process.trust.material.secrets


async def test_a_new_cluster_draws_a_secret_and_those_who_wait_get_it() -> None:
    trust = ClusterTrust(None, Drawing())
    waiting = asyncio.ensure_future(trust.material())
    await asyncio.sleep(0)
    assert not waiting.done()
    trust.begin()
    assert await waiting == TrustMaterial(100, (secret(1),))


async def test_a_later_controller_goes_on_with_the_newest_that_lives_and_draws_only_if_nobody_does() -> None:
    older, newer = TrustMaterial(7, (secret(8),)), TrustMaterial(8, (secret(9), secret(8)))
    later = ClusterTrust(None, Drawing())
    later.restore([older, None, newer, older], 8)
    assert await later.material() == newer
    assert later.is_rotating, "a replacement that was under way goes on"
    alone = ClusterTrust(None, Drawing())
    alone.restore([None, None], 5000)
    assert await alone.material() == TrustMaterial(5001, (secret(1),)), "later than all that was given out"


async def test_a_secret_is_replaced_without_a_moment_when_two_processes_have_none_in_common() -> None:
    trust, actors = new_trust(), processes(None, None)
    assert await spread_trust(actors, trust)
    trust.rotate()
    actors[1].is_hanging = True
    actors[1].failure = UNAVAILABLE
    assert not await spread_trust(actors, trust)
    assert [accepted(actor) for actor in actors] == [(secret(2), secret(1)), (secret(1),)]
    actors[1].is_hanging, actors[1].failure = False, None
    assert await spread_trust(actors, trust)
    assert [accepted(actor) for actor in actors] == [(secret(2),), (secret(2),)]
    assert not trust.is_rotating


async def test_one_that_misses_the_last_step_accepts_the_older_secret_until_it_is_told() -> None:
    trust, actors = new_trust(), processes(None, None)
    await spread_trust(actors, trust)
    trust.rotate()
    for actor in actors:
        await give_trust(actor, trust)
    assert trust.settle([trust.generation, trust.generation])
    await give_trust(actors[0], trust)
    assert [accepted(actor) for actor in actors] == [(secret(2),), (secret(2), secret(1))]


async def test_replacing_again_and_again_stays_bounded() -> None:
    trust = new_trust()
    for _ in range(20):
        trust.rotate()
    assert (await trust.material()).secrets == tuple(secret(number) for number in range(21, 13, -1))


async def test_a_secret_in_a_file_is_not_drawn_not_asked_for_and_not_replaced_by_a_call(tmp_path: Path) -> None:
    trust = ClusterTrust(tmp_path / "secret", Drawing())
    trust.restore([TrustMaterial(9, (secret(9),))], 9)
    assert await trust.material() == TrustMaterial(1, secret_file=str(tmp_path / "secret"))
    with pytest.raises(SecretIsInFile, match="write a new secret above the old one on every node"):
        trust.rotate()


async def test_a_later_controller_asks_those_that_live() -> None:
    material = TrustMaterial(7, (secret(7),))
    actors = processes(None, material, material)
    actors[2].die()
    assert await find_trust(lambda: actors, 5.0) == [material]
    assert await find_trust(list, 5.0) == []
    for actor in actors:
        actor.die()
    assert await find_trust(lambda: actors, 5.0) == []


async def test_a_later_controller_waits_for_the_silent_while_it_knows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.pool.trust_calls._REASK_DELAY_S", 0.01)
    material = TrustMaterial(7, (secret(7),))
    [actor] = processes(material)
    actor.failure = UNAVAILABLE
    asking = asyncio.ensure_future(find_trust(lambda: [actor], 30.0))
    await asyncio.sleep(0.05)
    assert not asking.done()
    actor.failure = None
    assert await asking == [material]
    actor.failure = UNAVAILABLE
    assert await find_trust(lambda: [actor], 0.03) == []
