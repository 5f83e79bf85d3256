from dataclasses import replace

import pytest

from actors.core.steps.chunk_budget import StepCosts
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import NUM_FEATURES, StepShape
from cluster.routing.costs.step_prediction import StepFamily, StepPrediction
from tests.cluster.routing.cost_setup import COEFFICIENTS, cost_model

_PREDICTION = StepPrediction(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)


def test_a_decode_step_is_predicted_as_the_engine_predicts_it() -> None:
    assert _PREDICTION.decode_step_s(40, 40_000) == pytest.approx(cost_model().seconds(StepShape(40, 40, 40_000)))


@pytest.mark.parametrize("num_tokens", [1, 200, 500, 1700])
@pytest.mark.parametrize("num_before", [0, 4096])
@pytest.mark.parametrize("num_decodes", [0, 12])
def test_a_prompt_takes_as_long_as_the_steps_of_its_chunks(num_tokens: int, num_before: int, num_decodes: int) -> None:
    context, budget = 1000 * num_decodes, 512
    steps = _PREDICTION.prefill_steps(num_tokens, num_before, num_decodes, context, budget)
    total_s, left, before = 0.0, num_tokens, num_before
    while left:
        chunk = min(left, budget - num_decodes)
        pairs = chunk * (before + chunk / 2)
        shape = StepShape(chunk + num_decodes, num_decodes, context, 1, before, pairs)
        total_s += cost_model().seconds(shape)
        left, before, last = left - chunk, before + chunk, chunk
    assert steps.seconds == pytest.approx(total_s)
    assert steps.last_tokens == last
    assert steps.num_steps == -(-num_tokens // (budget - num_decodes))
    alone_s = steps.num_steps * _PREDICTION.decode_step_s(num_decodes, context) if num_decodes else 0
    assert steps.added_s == pytest.approx(total_s - alone_s)


@pytest.mark.parametrize("bound_s", [0.025, 0.03, 0.05])
@pytest.mark.parametrize("num_before", [0, 4096])
def test_chunks_beside_decodes_are_those_that_the_scheduler_cuts_for_the_same_bound(
    bound_s: float, num_before: int
) -> None:
    num_decodes, context, num_tokens = 12, 12_000, 1700
    steps = _PREDICTION.prefill_steps(num_tokens, num_before, num_decodes, context, 2048, bound_s)
    costs, before, num_steps = StepCosts.of(cost_model()), num_before, 0
    while before < num_before + num_tokens:
        fixed_s = costs.step + costs.prefill + costs.decode * num_decodes + costs.decode_context * context
        left_s = bound_s - fixed_s - costs.prefill_context * before - costs.tokens(num_decodes)
        before += max(int(costs.largest_chunk(num_decodes, before, left_s)), 128)
        num_steps += 1
    assert abs(steps.num_steps - num_steps) <= 1
    assert steps.seconds / steps.num_steps < 1.02 * bound_s
    assert steps.num_steps > _PREDICTION.prefill_steps(num_tokens, num_before, num_decodes, context, 2048).num_steps


def test_a_bound_that_not_even_the_decodes_keep_leaves_prompts_a_sixteenth_of_a_step() -> None:
    steps = _PREDICTION.prefill_steps(1700, 0, 12, 12_000, 2048, 1e-6)
    assert steps.num_steps == -(-1700 // 128)
    assert _PREDICTION.prefill_steps(1700, 0, 0, 0, 2048, 1e-6).num_steps == 1, "nobody waits for the step"


def test_mixed_steps_that_nobody_has_run_cost_the_prompt_and_the_decodes() -> None:
    decode = [1.0 if number in (6, 7) else 0.0 for number in range(11)]
    prefill = [0.0, 2.0, *[0.0] * 9]
    steps = StepPrediction(decode, prefill, None).prefill_steps(10, 0, 3, 50, 2048)
    assert steps.seconds == 2.0 * (10 + 3) + 3 + 50


def test_small_chunks_beside_decodes_cost_little_more_than_the_decodes_though_prefill_has_run_large_ones_only() -> None:
    """An engine that has computed chunks of 512 tokens only cannot tell what part of their time a step takes anyway."""
    decode, prefill = [0.0] * NUM_FEATURES, [0.0] * NUM_FEATURES
    decode[0], prefill[0] = 0.010, 0.110
    prediction = StepPrediction(decode, prefill, None)
    (small_s, large_s) = (prediction.prefill_steps(chunk, 0, 1, 0, 2048).seconds for chunk in (31, 511))
    assert small_s == pytest.approx(0.010 + 0.100 * 32 / 512)
    assert large_s == pytest.approx(0.110)
    larger_s = prediction.prefill_steps(2047, 0, 1, 0, 2048).seconds
    assert larger_s == pytest.approx(0.110), "what prefill says of larger chunks is known"


def test_an_engine_knows_decode_steps_from_another_one_that_has_run_them() -> None:
    family = StepFamily()
    family.put("p", cost_model(kinds=("prefill",)))
    assert family.prediction("p") is None
    family.put("d", cost_model(kinds=("decode",)))
    known = family.prediction("p")
    assert known is not None
    assert known.decode_step_s(40, 40_000) == _PREDICTION.decode_step_s(40, 40_000)
    assert family.prediction("new") is not None


def test_equal_engines_have_equal_predictions() -> None:
    family = StepFamily()
    family.put("a", cost_model())
    family.put("b", cost_model(1.05))
    one, other = family.prediction("a"), family.prediction("b")
    assert one is not None
    assert other is not None
    assert one.decode_step_s(8, 8000) == other.decode_step_s(8, 8000)


def test_an_engine_that_is_twice_as_slow_is_so_in_what_it_has_not_done_yet() -> None:
    family = StepFamily()
    family.put("fast", cost_model())
    family.put("slow", cost_model(2.0, kinds=("decode",)))
    slow = family.prediction("slow")
    assert slow is not None
    assert slow.decode_step_s(8, 8000) == pytest.approx(2 * _PREDICTION.decode_step_s(8, 8000))
    expected_s = 2 * _PREDICTION.prefill_steps(500, 0, 0, 0, 2048).seconds
    assert slow.prefill_steps(500, 0, 0, 0, 2048).seconds == pytest.approx(expected_s)


def test_an_engine_that_is_slow_at_one_kind_of_steps_is_not_so_at_those_that_it_knows() -> None:
    family = StepFamily()
    family.put("quick", cost_model(kinds=("decode",)))
    own = cost_model(3.0, kinds=("decode", "prefill"))
    family.put("slow", own)
    slow, seconds = family.prediction("slow"), own.seconds(StepShape(500, 0, 0, 1, 0, 500 * 250))
    assert slow is not None
    assert slow.prefill_steps(500, 0, 0, 0, 2048).seconds == pytest.approx(seconds), "three times, and not nine"


def test_a_model_that_is_not_sure_predicts_nothing() -> None:
    family = StepFamily()
    family.put("a", cost_model(error=0.9))
    assert family.prediction("a") is None
    family.put("a", cost_model())
    assert family.prediction("a") is not None
    family.put("a", None)
    assert family.prediction("a") is None


def test_the_leader_stays_as_long_as_no_other_engine_has_run_twice_the_steps() -> None:
    family = StepFamily()
    family.put("a", cost_model())
    other = cost_model(1.05)
    family.put("b", replace(other, residuals=tuple(replace(one, num_steps=1999) for one in other.residuals)))
    prediction = family.prediction("c")
    assert prediction is not None
    assert prediction.decode_step_s(8, 0) == _PREDICTION.decode_step_s(8, 0)
    family.put("b", replace(other, residuals=tuple(replace(one, num_steps=2000) for one in other.residuals)))
    prediction = family.prediction("c")
    assert prediction is not None
    assert prediction.decode_step_s(8, 0) == pytest.approx(1.05 * _PREDICTION.decode_step_s(8, 0))


def test_an_engine_whose_model_errs_for_a_moment_stays_known() -> None:
    def erring(error: float) -> StepCostModel:
        model = cost_model()
        return replace(model, residuals=tuple(replace(one, median_size=error) for one in model.residuals))

    family = StepFamily()
    family.put("a", erring(0.5))
    assert family.prediction("a") is None, "it was never sure"
    family.put("a", erring(0.1))
    family.put("a", erring(0.9))
    assert family.prediction("a") is not None
    family.put("a", erring(1.1))
    assert family.prediction("a") is None


def test_errors_at_one_kind_of_steps_leave_what_is_known_of_others() -> None:
    """A prefill engine that decoded a few requests and then none keeps the errors of these steps for ever."""

    def prefilling(decode_error: float) -> StepCostModel:
        model = cost_model(kinds=("decode", "prefill"))
        decode, *others = model.residuals
        return replace(model, residuals=(replace(decode, median_size=decode_error), *others))

    family = StepFamily()
    family.put("decode-0", cost_model(1.1, kinds=("decode",)))
    family.put("prefill-0", prefilling(0.02))
    family.put("prefill-0", prefilling(1.1))
    found = family.prediction("decode-0")
    assert found is not None
    assert found.prefill_steps(500, 0, 0, 0, 2048) == _PREDICTION.prefill_steps(500, 0, 0, 0, 2048)
    there = family.prediction("prefill-0")
    assert there is not None
    assert there.decode_step_s(8, 0) == found.decode_step_s(8, 0) != _PREDICTION.decode_step_s(8, 0)
