import pytest

from cluster.routing.costs.decode_neighbours import decodes_beside
from cluster.routing.costs.request_facts import RequestFacts
from cluster.routing.costs.route_cost import decode_cost
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.load_book import EngineWork
from tests.cluster.routing.cost_setup import COEFFICIENTS

STEPS = StepPrediction(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
FACTS = RequestFacts(1024, 100, now_s=50.0)


def work(**numbers: float) -> EngineWork:
    made = EngineWork(("a", 1), STEPS)
    for field, value in numbers.items():
        setattr(made, field, value)
    return made


def test_those_that_decode_now_and_those_that_come_first_end_while_a_request_waits() -> None:
    now = work(num_decodes=10, num_context_tokens=10_000)
    assert decodes_beside(FACTS, now, STEPS, 0.0) == (10, 10_000)
    answer_s = 100 * STEPS.decode_step_s(1, 1_000)
    later = [decodes_beside(FACTS, now, STEPS, times * answer_s)[0] for times in (0.01, 0.5, 1, 2, 100)]
    assert later == sorted(later, reverse=True)
    assert later[0] == pytest.approx(10, rel=0.02)
    assert later[-1] < 1e-3
    coming = work(num_decodes=10, num_context_tokens=10_000, num_coming_decodes=10)
    kept = [decodes_beside(FACTS, coming, STEPS, times * answer_s)[0] for times in (0.01, 1, 2, 40)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == pytest.approx(10, rel=0.02)
    assert kept[-1] == pytest.approx(10 / 40, rel=0.2), "ten began over the time of forty answers"
    assert all(more > less for more, less in zip(kept[1:3], later[2:4], strict=True))


def test_a_decode_on_a_prefill_engine_delays_the_prompts_there() -> None:
    facts = RequestFacts(1024, 100, ttft_s=0.2, itl_s=0.02, now_s=50.0)
    engine = work(prompt_share=0.5, queue_end_s=50.1, mixed_step_bound_s=0.012)
    found = decode_cost(facts, engine, STEPS, prefers_prompts=True)
    bare_s = STEPS.prefill_steps(1024, 0, 0, 0, 2048).seconds
    beside_s = STEPS.prefill_steps(1024, 0, 1, 1024, 2048, 0.012).seconds
    num_prompts = 0.5 * 100 * found.step_s / bare_s
    assert found.prompts_delay_s == pytest.approx(num_prompts * (1 + 0.1 / bare_s / 2) * (beside_s - bare_s))
    assert found.penalty_s > 0, "they may miss their time to the first token"
    assert decode_cost(facts, engine, STEPS).prompts_delay_s == 0
    assert decode_cost(facts, work(), STEPS, prefers_prompts=True).prompts_delay_s == 0
