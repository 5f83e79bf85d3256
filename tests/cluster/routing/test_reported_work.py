import math

import pytest

from actors.core.outputs.sent_work import SentWork
from actors.core.steps.chunk_budget import ALL_LATE
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.reported_work import CountedWork, EngineWork, Link, queue_seconds
from kv_transfer.link_load import LinkLoad
from tests.cluster.routing.cost_setup import COEFFICIENTS

_STEPS = StepPrediction(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)


def _work() -> EngineWork:
    work = EngineWork(("both-0", 1), _STEPS, num_decodes=10, num_context_tokens=10_000)
    work.mixed_step_bound_s, work.late_after_s = 0.012, 1.0
    return work


def test_steps_may_be_longer_if_nobody_is_in_time_or_the_prompt_will_be_late() -> None:
    work = _work()
    assert work.step_limits() == work.step_limits(0.9) == (2048, 0.012)
    assert work.step_limits(1.1) == (2048, 0.012 * ALL_LATE)
    work.in_time_part = 0.0
    assert work.step_limits() == (2048, 0.012 * ALL_LATE)
    work.in_time_part, work.late_after_s = 1.0, 0.0
    assert work.step_limits(math.inf) == (2048, 0.012), "no request is late without an aim"


def test_a_queue_is_worked_off_faster_from_when_on_its_prompts_are_late() -> None:
    work = _work()
    short_s, long_s = queue_seconds(work, 2048), queue_seconds(work, 20_480)
    assert 0 < long_s < 10 * short_s
    work.late_after_s = 0.0
    assert queue_seconds(work, 20_480) == pytest.approx(10 * short_s)


def test_nothing_is_known_of_the_queue_of_an_engine_without_predictions() -> None:
    assert queue_seconds(EngineWork(("both-0", 1)), 1000) == 0
    assert queue_seconds(_work(), 0) == 0


def test_a_link_that_was_not_looked_at_is_as_the_engine_reports_it() -> None:
    work = _work()
    work.reported_links = {"decode-0": LinkLoad("decode-0", 5000, 2e9, 0.002)}
    assert work.link_to("decode-0") == Link(5000, 2e9, 0.002)
    assert work.link_to("decode-1") == Link()


def test_the_work_since_the_report_is_that_of_all_ingresses() -> None:
    work, (old, new, of_another) = _work(), (SentWork(number) for number in (1, 2, 3))
    work.sent = {"old": CountedWork(0, old), "new": CountedWork(1, new)}
    work.announced = [CountedWork(9, of_another)]
    assert work.sent_since() == [new, of_another]
