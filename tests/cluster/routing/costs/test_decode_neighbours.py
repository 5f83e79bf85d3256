import math

import pytest

from cluster.routing.costs.decode_neighbours import decodes_beside, num_meeting_aims
from cluster.routing.costs.request_facts import RequestFacts
from cluster.routing.costs.route_cost import decode_cost, prompt_cost
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.reported_work import EngineWork
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
    assert decodes_beside(FACTS, now, STEPS, 0.0, 0.0) == (10, 10_000)
    answer_s = 100 * STEPS.decode_step_s(1, 1_000)
    later = [
        decodes_beside(FACTS, now, STEPS, times * answer_s, times * answer_s)[0] for times in (0.01, 0.5, 1, 2, 100)
    ]
    assert later == sorted(later, reverse=True)
    assert later[0] == pytest.approx(10, rel=0.02)
    assert later[-1] < 1e-3
    coming = work(num_decodes=10, num_context_tokens=10_000, num_coming_decodes=10)
    kept = [decodes_beside(FACTS, coming, STEPS, times * answer_s, times * answer_s)[0] for times in (0.01, 1, 2, 40)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == pytest.approx(10, rel=0.02)
    assert kept[-1] == pytest.approx(10 / 40, rel=0.2), "ten began over the time of forty answers"
    assert all(more > less for more, less in zip(kept[1:3], later[2:4], strict=True))


def test_those_whose_prompts_are_far_behind_in_a_queue_are_not_there_when_a_prompt_is_computed() -> None:
    engine = work(num_decodes=10, num_context_tokens=10_000, num_coming_decodes=10, reported_at_s=50.0)
    soon, late = (prompt_cost(FACTS, engine, STEPS, 0, coming_s=coming_s) for coming_s in (0.0, 60.0))
    assert soon.inflicted_s > 0, "all of them count as there"
    assert late.inflicted_s == 0, "none has begun yet"
    reported = work(num_decodes=10, num_context_tokens=10_000, num_coming_decodes=10, reported_at_s=49.5)
    assert 0 < prompt_cost(FACTS, reported, STEPS, 0, coming_s=60.0).inflicted_s < 0.1 * soon.inflicted_s


def test_without_reports_those_that_came_long_ago_count_as_there() -> None:
    silent = work(num_decodes=10, num_context_tokens=10_000, num_coming_decodes=10)
    answer_s = 100 * STEPS.decode_step_s(10, 10_000)
    assert decodes_beside(FACTS, silent, STEPS, 0.0, answer_s)[0] == pytest.approx(5, rel=0.2)
    assert decodes_beside(FACTS, silent, STEPS, 0.0, 0.01 * answer_s)[0] == pytest.approx(10, rel=0.02)


def test_answers_take_longer_where_prompts_are_queued_so_more_of_them_are_there() -> None:
    numbers = {"num_decodes": 20, "num_context_tokens": 20_000, "num_coming_decodes": 20, "reported_at_s": 50.0}
    idle, busy = work(**numbers), work(**numbers, queue_end_s=60.0, mixed_step_bound_s=0.02)
    few, many = (decodes_beside(FACTS, engine, STEPS, 10.0, 20.0)[0] for engine in (idle, busy))
    assert 0 < 1.5 * few < many < 20


@pytest.mark.parametrize("begins_in_s", [0.5, 3.0, 20.0])
def test_the_number_of_decodes_follows_from_the_time_that_an_answer_takes_beside_them(begins_in_s: float) -> None:
    coming = work(num_decodes=20, num_context_tokens=20_000, num_coming_decodes=20, reported_at_s=50.0)
    found, _ = decodes_beside(FACTS, coming, STEPS, begins_in_s, begins_in_s)
    answer_s = 100 * STEPS.decode_step_s(found, found * 1000)
    assert found == pytest.approx(20 * answer_s / begins_in_s * (1 - math.exp(-begins_in_s / answer_s)), rel=0.1)


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


def test_a_prompt_that_will_be_late_is_computed_in_larger_chunks() -> None:
    numbers = {"num_decodes": 10, "num_context_tokens": 10_000, "queue_end_s": 53.0, "mixed_step_bound_s": 0.012}
    engines = [work(**numbers, late_after_s=after_s) for after_s in (3.1, 2.9)]
    in_time, late = (prompt_cost(FACTS, engine, STEPS, 0).seconds for engine in engines)
    assert in_time == STEPS.prefill_steps(1024, 0, 10, 10_000, 2048, 0.012).seconds
    assert late == STEPS.prefill_steps(1024, 0, 10, 10_000, 2048, 0.048).seconds < in_time


def test_those_whose_gaps_a_queue_of_prompts_makes_too_long_meet_their_aims_no_more() -> None:
    facts = RequestFacts(1024, 100, ttft_s=5.0, itl_s=0.02, now_s=50.0)

    def meeting(wait_s: float, num_coming: float = 0.0, **numbers: float) -> float:
        ten = {"num_decodes": 10, "num_context_tokens": 10_000, "num_coming_decodes": num_coming}
        return num_meeting_aims(facts, work(**ten, queue_end_s=50.0 + wait_s, **numbers), STEPS)

    assert num_meeting_aims(facts, work(), STEPS) == 0.0
    assert meeting(0.0) == pytest.approx(10, rel=1e-3)
    longest_s = 100 * (0.02 - STEPS.decode_step_s(10, 10_000))
    assert meeting(longest_s) == pytest.approx(5, rel=0.01), "a tie between the mean of the gaps and the aim"
    assert meeting(2 * longest_s) < 0.1
    # Of those that are queued themselves each has half of the others behind it, on average.
    assert meeting(2 * longest_s, num_coming=10) == pytest.approx(5, rel=0.01)
    # Most of an answer has come already, with short gaps.
    assert meeting(2 * longest_s, num_gaps_of_each=90, decode_gap_s=0.01) > 9


def test_those_that_had_their_first_tokens_too_late_meet_their_aims_no_more() -> None:
    facts = RequestFacts(1024, 100, ttft_s=5.0, itl_s=0.02, now_s=50.0)
    engine = work(num_decodes=10, num_context_tokens=10_000, num_late=4)
    assert num_meeting_aims(facts, engine, STEPS) == pytest.approx(6, rel=1e-3)
