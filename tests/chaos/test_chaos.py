"""A served cluster under load and under fire. Whatever failed is played again by its seed: RAYPD_CHAOS_SEED."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import DEMO_MODEL
from tests.chaos.answers import learn_answers
from tests.chaos.chaos_run import Chaos, chaos_cluster, check_report, possible_kinds, run_chaos
from tests.chaos.faults import TWO_AND_TWO, FaultKind, Fleet
from tests.chaos.report import ChaosReport
from tests.chaos.visits import draw_questions
from tests.patience import TEST_S

pytestmark = [pytest.mark.more, pytest.mark.ray]

SEED = int(os.environ.get("RAYPD_CHAOS_SEED", "1"))


async def run_and_check(chaos: Chaos, num_questions: int, model_directory: Path, directory: Path) -> ChaosReport:
    asked = learn_answers(draw_questions(chaos.seed, num_questions), model_directory)
    with chaos_cluster(model_directory, directory, chaos.fleet) as cluster:
        report = await run_chaos(chaos, asked, cluster, print)
        report.show(Console())
        check_report(report)
    return report


@pytest.mark.timeout(TEST_S)
async def test_no_fault_loses_or_changes_a_token_or_leaves_anything_behind(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = possible_kinds()[0] - {FaultKind.STOP_UNTIL_REPLACED}
    chaos = Chaos(SEED, num_requests=60, num_faults=len(kinds), requests_per_s=3.0, mean_delay_s=0.4, kinds=kinds)
    report = await run_and_check(chaos, 10, checkpoint("llama"), tmp_path)
    assert set(report.faults) == {kind.value for kind in kinds}
    assert report.num_affected > 0, "this seed is too quiet"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fleet", "model"),
    [
        (Fleet(1, 2), "demo"),
        (TWO_AND_TWO, "llama"),
        (TWO_AND_TWO, "deepseek_v3"),
        (TWO_AND_TWO, "granite_4_hybrid"),
    ],
    ids=["1P+2D of the demo model", "2P+2D", "2P+2D with latent attention", "2P+2D with recurrent states"],
)
async def test_a_hundred_faults_lose_or_change_no_token_of_two_thousand_requests(
    checkpoint: Callable[[str], Path], tmp_path: Path, fleet: Fleet, model: str
) -> None:
    kinds, _ = possible_kinds()
    chaos = Chaos(SEED, num_requests=2000, num_faults=100, fleet=fleet, kinds=kinds)
    report = await run_and_check(chaos, 48, DEMO_MODEL if model == "demo" else checkpoint(model), tmp_path)
    assert sum(report.outcomes.values()) >= 2000
