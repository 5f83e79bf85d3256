import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.costs.request_facts import RequestFacts, miss_probability
from cluster.routing.costs.route_cost import decode_cost, fetch_s, prompt_cost, terms, usual_costs
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.decision import RouteTerms, Way
from cluster.routing.reported_work import EngineWork, Link, queue_seconds
from tests.cluster.routing.cost_setup import COEFFICIENTS

_STEPS = StepPrediction(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
_FACTS = RequestFacts(1024, 100, now_s=50.0)


def _work(name: str = "a", **numbers: float | dict[str, Link]) -> EngineWork:
    work = EngineWork((name, 1), _STEPS, kv_bytes_per_token=1000, num_blocks=1000, num_free_blocks=1000)
    for field, value in numbers.items():
        setattr(work, field, value)
    return work


def _pair(producer: EngineWork, consumer: EngineWork, facts: RequestFacts = _FACTS) -> RouteTerms:
    return terms(
        Way.PREFILL_DECODE, facts, prompt_cost(facts, producer, _STEPS, 0), decode_cost(facts, consumer, _STEPS)
    )


def _alone(work: EngineWork, facts: RequestFacts = _FACTS, num_cached: int = 0) -> RouteTerms:
    cost = prompt_cost(facts, work, _STEPS, num_cached)
    return terms(Way.DECODE_ALONE, facts, cost, decode_cost(facts, work, _STEPS))


def test_an_idle_engine_takes_the_time_of_its_steps() -> None:
    found = _alone(_work())
    assert found.prefill_s == _STEPS.prefill_steps(1024, 0, 0, 0, 2048).seconds
    assert found.decode_s == pytest.approx(100 * _STEPS.decode_step_s(1, 1024 + 50))
    assert found.total_s == pytest.approx(found.prefill_s + found.decode_s)
    assert (found.ttft_s, found.inflicted_s) == (found.prefill_s, 0)


def test_each_request_that_decodes_there_is_delayed_by_the_prompt_and_by_a_larger_batch() -> None:
    found = _alone(_work(num_decodes=10, num_context_tokens=10_000))
    prompt_s = _STEPS.prefill_steps(1024, 0, 10, 10_000, 2048).added_s
    longer_s = _STEPS.decode_step_s(11, 10_000 + 1074) - _STEPS.decode_step_s(10, 10_000)
    assert found.inflicted_s == pytest.approx(10 * prompt_s + 10 * 100 * longer_s)


def test_a_cached_prefix_saves_its_computation_except_for_the_last_token() -> None:
    assert _alone(_work(), num_cached=2000).prefill_s == _STEPS.prefill_steps(1, 1023, 0, 0, 2048).seconds
    assert _alone(_work(), num_cached=512).prefill_s == _STEPS.prefill_steps(512, 512, 0, 0, 2048).seconds


def test_the_queue_counts_until_it_is_empty() -> None:
    assert _alone(_work(queue_end_s=50.5)).prefill_wait_s == 0.5
    assert _alone(_work(queue_end_s=49.5)).prefill_wait_s == 0


def test_a_prompt_of_a_queue_ends_with_a_step_that_computes_prompts_behind_it() -> None:
    full_s = _STEPS.prefill_steps(2048, 0, 0, 0, 2048).seconds
    assert _alone(_work(queue_end_s=52.0, prompt_share=0.5)).prefill_wait_s == pytest.approx(2.0 + full_s / 2)
    few = _alone(_work(queue_end_s=50.5, prompt_share=0.1))
    assert few.prefill_wait_s == pytest.approx(0.5 + 0.05), "no more than comes while it waits"
    assert _alone(_work(prompt_share=0.5)).prefill_wait_s == 0, "without a queue it has a step of its own"


def test_the_queue_is_predicted_with_the_chunks_that_the_engines_bound_allows() -> None:
    work = _work(num_decodes=10, num_context_tokens=10_000)
    free_s = _alone(work).prefill_s
    work.mixed_step_bound_s = 0.012
    assert _alone(work).prefill_s > 1.2 * free_s
    assert queue_seconds(work, 4096) == pytest.approx(4 * _alone(work).prefill_s, rel=0.1)


def _gap_miss(num_tokens: int, share: float, itl_s: float | None = 0.01, num_output_tokens: float = 100) -> float:
    facts = RequestFacts(num_tokens, num_output_tokens, itl_s=itl_s, now_s=50.0)
    work = _work(num_decodes=10, num_context_tokens=10_000, prompt_share=share)
    assert decode_cost(facts, work, _STEPS).gap_miss == 0.0, "other roles keep their steps within twice the aim"
    # Long gaps cost 2 % of a missed aim.
    return decode_cost(facts, work, _STEPS, prefers_prompts=True).gap_miss / 0.02


def test_a_request_that_decodes_where_prompts_come_first_has_single_gaps_that_are_too_long() -> None:
    assert _gap_miss(1000, share=0.4) > 0.99
    assert _gap_miss(1000, share=0.0) == 0.0
    assert _gap_miss(1000, share=0.4, itl_s=None) == 0.0
    assert _gap_miss(20, share=0.4) < 0.01, "steps with short prompts take less than twice the aim"
    rare, longer = _gap_miss(1000, share=0.01), _gap_miss(1000, share=0.01, num_output_tokens=1000)
    assert 0.05 < rare < 0.6
    assert 0.05 < longer < 0.6, "of 1000 gaps ten have to be too long"


def test_prefill_begins_when_the_decode_engine_has_reserved_blocks() -> None:
    found = _pair(_work(queue_end_s=50.25), _work("b", queue_end_s=51.0))
    assert (found.prefill_wait_s, found.decode_wait_s) == (0.25, 0.75)
    assert found.ttft_s == pytest.approx(1.0 + found.prefill_s)


def test_a_transfer_is_hidden_by_the_chunks_that_are_computed_after_the_first() -> None:
    facts = RequestFacts(4096, 100, now_s=50.0)
    consumer = _work("b")
    slow, fast = Link(0, 4096 * 1000 / 100.0, 0.125), Link(0, 1e12, 0.125)
    steps = _STEPS.prefill_steps(4096, 0, 0, 0, 2048)
    assert steps.num_steps == 2
    found = _pair(_work(links={"b": slow}), consumer, facts)
    assert found.transfer_s == pytest.approx(0.125 + 100.0 - steps.seconds / 2)
    assert _pair(_work(links={"b": fast}), consumer, facts).transfer_s == pytest.approx(0.125, abs=1e-4)
    assert found.itl_s == pytest.approx(found.decode_s / 100 + found.transfer_s / 100)


def test_bytes_that_are_queued_go_first_while_the_prompt_waits() -> None:
    link = Link(2_000_000, 1e6, 0.0)
    found = _pair(_work(links={"b": link}, queue_end_s=51.5), _work("b"))
    assert found.transfer_s == pytest.approx(2.0 + 1.024 - 1.5)


def test_what_the_decode_engine_has_cached_is_not_sent() -> None:
    producer, consumer = _work(links={"b": Link(0, 1e6, 0.0)}), _work("b")
    cost = prompt_cost(_FACTS, producer, _STEPS, 0)
    found = terms(Way.PREFILL_DECODE, _FACTS, cost, decode_cost(_FACTS, consumer, _STEPS, 1000))
    assert found.transfer_s == pytest.approx(0.024)


def test_an_engine_whose_slots_for_states_are_full_is_a_wait() -> None:
    # 65 blocks of tokens are free, and 35 of a slot are not: one of 10 requests has to end, with 50 and 35 blocks.
    full = _work(num_decodes=10, num_context_tokens=8000, num_free_blocks=65, num_state_blocks=35)
    answer_s = 100 * decode_cost(_FACTS, full, _STEPS).step_s
    assert _alone(full).blocks_wait_s == pytest.approx(answer_s / 10 * 35 / 85)
    assert _pair(_work(), full).blocks_wait_s == pytest.approx(answer_s / 10 * 35 / 85)
    free = _work(num_decodes=10, num_context_tokens=8000, num_free_blocks=100, num_state_blocks=35)
    assert _alone(free).blocks_wait_s == 0


def test_the_state_is_sent_behind_the_last_chunk() -> None:
    """All of it is waited for: 10 blocks of 16 tokens, of 1000 bytes each."""
    links = {"b": Link(0, 1e8, 0.0)}
    without, with_state = (_pair(_work(links=links, num_state_blocks=number), _work("b")) for number in (0, 10))
    assert with_state.transfer_s == pytest.approx(without.transfer_s + 0.0016)


def test_blocks_become_free_as_those_that_decode_end() -> None:
    # 65 blocks are wanted. Each of 10 requests has 50, and one of them ends every tenth of an answer.
    work = _work(num_decodes=10, num_context_tokens=8000, num_free_blocks=15)
    answer_s = 100 * decode_cost(_FACTS, work, _STEPS).step_s
    assert _alone(work).blocks_wait_s == pytest.approx(answer_s / 10, rel=0.02)
    assert _pair(work, _work("b")).blocks_wait_s == pytest.approx(answer_s / 10, rel=0.02)
    assert _alone(_work(num_decodes=10, num_context_tokens=8000, num_free_blocks=65)).blocks_wait_s == 0
    assert _alone(_work(num_decodes=4, num_context_tokens=8, max_num_seqs=4)).blocks_wait_s > 0


def test_tokens_come_later_where_an_engine_spends_its_time_on_prompts() -> None:
    assert _alone(_work(prompt_share=0.5)).itl_s == pytest.approx(2 * _alone(_work()).itl_s)


def test_a_fetch_counts_only_if_it_is_quicker_than_the_computation() -> None:
    work = _work()
    fetched = prompt_cost(_FACTS, work, _STEPS, 0, (512, 0.001))
    assert (fetched.num_cached_tokens, fetched.fetch_s) == (512, 0.001)
    computed = prompt_cost(_FACTS, work, _STEPS, 0, (512, 10.0))
    assert (computed.num_cached_tokens, computed.fetch_s) == (0, 0.0)
    assert prompt_cost(_FACTS, work, _STEPS, 512, (512, 0.0)).fetch_s == 0.0
    source = _work("b", links={"a": Link(500_000, 1e6, 0.25)})
    assert fetch_s(work, source, 500) == 0.25 + 1.0


@given(st.floats(0.01, 2.0), st.floats(0.01, 2.0))
def test_the_penalty_grows_with_the_probability_to_miss_an_aim(one_s: float, other_s: float) -> None:
    facts = [RequestFacts(1024, 100, aim_s, aim_s / 10, 50.0) for aim_s in (one_s, other_s)]
    found = [_alone(_work(), one) for one in facts]
    low, high = sorted(found, key=lambda one: one.ttft_miss_probability)
    assert low.itl_miss_probability <= high.itl_miss_probability + 1e-9, "both grow as the aims become tighter"
    for one, fact in zip(found, facts, strict=True):
        missed = 1 - (1 - one.ttft_miss_probability) * (1 - one.itl_miss_probability)
        assert one.miss_penalty_s == pytest.approx(10 * (fact.ttft_s or 0) * 11 * missed)


def test_half_of_the_requests_miss_an_aim_that_is_as_long_as_the_prediction() -> None:
    ttft_s = _alone(_work()).ttft_s
    assert _alone(_work(), RequestFacts(1024, 100, ttft_s, None, 50.0)).ttft_miss_probability == 0.5
    assert _alone(_work(), RequestFacts(1024, 100, None, None, 50.0)).miss_penalty_s == 0


def test_others_that_miss_their_aim_because_of_the_request_are_in_the_penalty() -> None:
    # A decode step of these ten takes 5 ms, and the prompt adds 1 ms to the mean of each.
    work = _work(num_decodes=10, num_context_tokens=10_000)
    lone, beside = (_alone(one, RequestFacts(1024, 100, None, 0.006, 50.0)) for one in (_work(), work))
    assert beside.miss_penalty_s > 10 * lone.miss_penalty_s


def test_others_are_at_risk_by_the_mean_of_their_gaps_so_far_and_of_those_to_come() -> None:
    facts = RequestFacts(1024, 100, None, 0.0055, 50.0)
    step_s, longer_s = _STEPS.decode_step_s(10, 10_000), _STEPS.decode_step_s(11, 10_000 + 1074)

    def penalty_s(gap_s: float, num_gaps: float = 50.0) -> float:
        work = _work(num_decodes=10, num_context_tokens=10_000, decode_gap_s=gap_s, num_gaps_of_each=num_gaps)
        return decode_cost(facts, work, _STEPS).penalty_s / facts.penalty_s

    def misses(gap_s: float) -> float:
        return miss_probability(gap_s, facts.itl_s, _STEPS.decode_sigma)

    assert penalty_s(0.0) == pytest.approx(10 * (misses((step_s + longer_s) / 2) - misses(step_s)))
    assert penalty_s(step_s) == penalty_s(0.0), "what is not known was as it is now"
    assert penalty_s(0.5 * step_s) < 0.1 * penalty_s(0.0), "they have been quick so far"
    assert penalty_s(2 * step_s) < 0.1 * penalty_s(0.0), "they miss the aim anyway"
    whole = 10 * (misses(longer_s) - misses(step_s))
    assert penalty_s(2 * step_s, 0.0) == pytest.approx(whole), "who has just begun has all of the answer left"
    assert penalty_s(1.2 * step_s, 10.0) == pytest.approx(
        10 * (misses(0.12 * step_s + 0.9 * longer_s) - misses(0.12 * step_s + 0.9 * step_s))
    )
    # Of answers that are longer than expected, half of an expected one is left: 0.2 of 250 gaps.
    assert penalty_s(step_s, 200.0) == pytest.approx(10 * (misses(0.8 * step_s + 0.2 * longer_s) - misses(step_s)))


def test_those_that_decode_beside_a_prompt_that_is_late_have_missed_their_aims_already() -> None:
    work = _work(num_decodes=10, num_context_tokens=10_000, queue_end_s=60.0)
    in_time, late = (RequestFacts(1024, 100, ttft_s, 0.006, 50.0) for ttft_s in (1e3, 1.0))
    assert prompt_cost(in_time, work, _STEPS, 0).penalty_s > 10 * in_time.penalty_s * 0.01
    assert prompt_cost(late, work, _STEPS, 0).penalty_s == pytest.approx(0.0, abs=1e-6 * late.penalty_s)
    # The wait of 10 s alone is a quarter longer than this aim.
    a_little_late = RequestFacts(1024, 100, 8.0, 0.006, 50.0)
    assert prompt_cost(a_little_late, work, _STEPS, 0).penalty_s < 0.01 * a_little_late.penalty_s
    work.num_late = 5.0
    half = prompt_cost(in_time, work, _STEPS, 0).penalty_s
    work.num_late = 0.0
    assert 2 * half == pytest.approx(prompt_cost(in_time, work, _STEPS, 0).penalty_s)


def test_those_that_decode_beside_a_decode_that_comes_late_have_missed_their_aims_already() -> None:
    # One decode more lengthens their steps of 5 ms to just above this aim.
    work = _work(num_decodes=10, num_context_tokens=10_000, queue_end_s=60.0)
    in_time, late = (RequestFacts(1024, 100, ttft_s, 0.0055, 50.0) for ttft_s in (1e3, 1.0))
    whole = decode_cost(in_time, work, _STEPS).penalty_s
    assert whole > 0.1 * in_time.penalty_s
    assert decode_cost(late, work, _STEPS).penalty_s == pytest.approx(0.0, abs=1e-6 * late.penalty_s)
    work.num_late = 5.0
    assert decode_cost(in_time, work, _STEPS).penalty_s == pytest.approx(whole / 2)


def test_a_request_that_misses_both_aims_is_one_missed_request_however_late_it_is() -> None:
    """Else a placement that is late by a little costs more than one that is late by much, and queues grow."""
    work = _work(num_decodes=10, num_context_tokens=10_000, prompt_share=0.5)
    idle_ttft_s = _alone(work).ttft_s
    penalties = []
    for wait_s in (1.3, 1.5, 2.0, 4.0):
        work.queue_end_s = 50.0 + wait_s
        facts = RequestFacts(1024, 100, 1.0 + idle_ttft_s, 0.005, 50.0)
        cost = prompt_cost(facts, work, _STEPS, 0)
        found = terms(Way.DECODE_ALONE, facts, cost, decode_cost(facts, work, _STEPS))
        assert found.itl_miss_probability > 0.99
        penalties.append(found.miss_penalty_s / facts.penalty_s)
    assert penalties == pytest.approx([1.0] * 4, abs=0.05)


_NUMBERS = st.floats(0, 300)


@given(
    num_decodes=st.one_of(st.just(0.0), _NUMBERS),
    num_context_tokens=st.floats(0, 1e7),
    num_free_blocks=st.floats(-100, 1000),
    prompt_share=st.floats(0, 0.8),
    max_num_seqs=st.sampled_from([0, 64, 256]),
    num_tokens=st.integers(1, 100_000),
    num_output_tokens=st.floats(1, 2000),
)
def test_the_costs_of_a_usual_request_are_those_of_a_prompt_and_of_its_decoding(
    num_decodes: float,
    num_context_tokens: float,
    num_free_blocks: float,
    prompt_share: float,
    max_num_seqs: int,
    num_tokens: int,
    num_output_tokens: float,
) -> None:
    work = _work(
        num_decodes=num_decodes,
        num_context_tokens=num_context_tokens,
        num_free_blocks=num_free_blocks,
        prompt_share=prompt_share,
        max_num_seqs=max_num_seqs,
    )
    facts = RequestFacts(num_tokens, num_output_tokens)
    prompt, decode = prompt_cost(facts, work, _STEPS, 0), decode_cost(facts, work, _STEPS)
    assert usual_costs(facts, work, _STEPS) == (
        prompt.seconds + prompt.inflicted_s,
        decode.seconds + decode.inflicted_s + decode.blocks_wait_s,
    )
