"""Requests of every way under random faults.

Whatever failed is played again by its seed, from the environment: RAYPD_CHAOS_SEED.
"""

from __future__ import annotations

import os

import pytest

from cluster.routing.decision import Way
from tests.faults.chaos import ChaosRun, draw_waves
from tests.faults.fault_points import Action
from tests.faults.live_engines import LiveEngines

SEED = int(os.environ.get("RAYPD_CHAOS_SEED", "1"))


async def run_chaos(engines: LiveEngines, num_requests: int, num_at_once: int) -> None:
    chaos = ChaosRun(engines)
    try:
        await chaos.run(draw_waves(SEED, num_requests, num_at_once))
    except AssertionError as error:
        raise AssertionError(f"with RAYPD_CHAOS_SEED={SEED}, {error}") from error
    assert chaos.num_answered + chaos.num_left == num_requests
    assert chaos.num_answered > num_requests // 2
    assert all(chaos.ways[way] > num_requests // 10 for way in Way), f"this seed is too quiet: {chaos.ways}"
    assert chaos.num_reroutes > 0, "this seed is too quiet"
    assert chaos.happened[Action.KILL] > 0, "this seed is too quiet"
    assert chaos.happened[Action.CUT_DATA] + chaos.happened[Action.CUT_CONTROL] > 0, "this seed is too quiet"


@pytest.mark.more
async def test_sixty_requests_with_random_faults_give_the_right_tokens(engines: LiveEngines) -> None:
    await run_chaos(engines, 60, 4)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_thousand_requests_with_random_faults_give_the_right_tokens(engines: LiveEngines) -> None:
    await run_chaos(engines, 1000, 10)


def test_a_seed_draws_the_same_faults_again() -> None:
    assert draw_waves(7, 100, 4) == draw_waves(7, 100, 4) != draw_waves(8, 100, 4)
