"""The fit against steps of a known engine, whose durations are a formula with noise."""

from __future__ import annotations

import math
import random

import pytest

from actors.costs.step_cost_fit import StepCostFit
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import FEATURES, StepShape

DECODES = [StepShape(n, n, n * context) for n in (1, 4, 16, 64) for context in (100, 1000, 4000)]
PREFILLS = [
    StepShape(chunk, 0, 0, 1, before, chunk * (before + chunk / 2)) for chunk in (64, 512, 2048) for before in (0, 4096)
]


def true_seconds(shape: StepShape) -> float:
    """A step of an engine that reads its weights in 10 ms and computes 20 000 tokens a second."""
    arithmetic_s = max(shape.num_tokens - 128, 0) / 20_000
    return 0.010 + arithmetic_s + shape.num_decode_context * 1e-7 + shape.num_prefill_pairs * 1e-9


def run(fit: StepCostFit, shapes: list[StepShape], num: int, rng: random.Random, factor: float = 1.0) -> None:
    for _ in range(num):
        shape = rng.choice(shapes)
        fit.observe(shape, factor * true_seconds(shape) * rng.lognormvariate(0, 0.03))


def worst_error(model: StepCostModel, shapes: list[StepShape], factor: float = 1.0) -> float:
    return max(abs(model.seconds(shape) / (factor * true_seconds(shape)) - 1) for shape in shapes)


def test_the_fit_finds_the_durations_of_steps() -> None:
    fit = StepCostFit()
    run(fit, DECODES + PREFILLS, 300, random.Random(1))
    model = fit.model()
    assert worst_error(model, DECODES + PREFILLS) < 0.06
    assert model.is_sure
    assert model.num_steps == 300
    assert 0.01 < model.residuals[0].sigma < 0.06


def test_steps_of_another_kind_are_not_forgotten() -> None:
    fit, rng = StepCostFit(), random.Random(2)
    run(fit, PREFILLS, 100, rng)
    run(fit, DECODES, 5000, rng)
    assert worst_error(fit.model(), PREFILLS) < 0.08


@pytest.mark.parametrize("factor", [1.25, 0.5, 2.0])
def test_a_change_of_speed_is_noticed_and_followed(factor: float) -> None:
    fit, rng = StepCostFit(), random.Random(3)
    run(fit, DECODES, 500, rng)
    assert fit.model().num_drifts == 0
    run(fit, DECODES, 192, rng, factor)
    model = fit.model()
    assert model.num_drifts >= 1
    assert worst_error(model, DECODES, factor) < 0.08


def test_drifts_of_decode_steps_do_not_add_up_in_prefill_that_is_never_run() -> None:
    # Steps become slow at once, which is noticed, and quick again bit by bit, which is not: all drifts go one way.
    rng = random.Random(8)
    donor = StepCostFit()
    run(donor, DECODES + PREFILLS, 500, rng)
    prior, num_drifts = donor.model(), 0
    for _ in range(3):
        fit = StepCostFit(prior)
        for _ in range(10):
            run(fit, DECODES, 100, rng)
            run(fit, DECODES, 100, rng, factor=2.0)
            for step in range(50):
                run(fit, DECODES, 4, rng, factor=2.0 ** (1 - step / 50))
        num_drifts += fit.model().num_drifts
        # Engines that start later begin with what this one has saved.
        prior = fit.lasting_model()
        for model in (fit.model(), prior):
            assert all(1 / 2 < model.seconds(shape) / true_seconds(shape) < 2 for shape in PREFILLS)
    assert num_drifts > 20


def test_what_is_only_known_from_a_prior_follows_the_speed_up_and_down() -> None:
    donor, rng = StepCostFit(), random.Random(9)
    run(donor, DECODES + PREFILLS, 500, rng)
    fit = StepCostFit(donor.model())
    for factor in (3.0, 0.5, 2.0, 1.0):
        run(fit, DECODES, 1000, rng, factor)
        assert worst_error(fit.model(), DECODES + PREFILLS, factor) < 0.1


def test_sizes_that_the_model_cannot_fit_are_no_drift() -> None:
    # Between 1 and 15 decodes the features know no bend, and this engine has one: at 4.
    fit, rng = StepCostFit(), random.Random(5)
    for number in range(40):
        count = (1, 2, 4, 8)[number % 4]
        for _ in range(64):
            seconds = 0.010 if count < 4 else 0.010 + 0.008 * (count - 3)
            fit.observe(StepShape(count, count, count * 1000), seconds * rng.lognormvariate(0, 0.03))
    model = fit.model()
    assert model.num_drifts == 0
    assert model.seconds(StepShape(8, 8, 8000)) > 2 * model.seconds(StepShape(1, 1, 1000))


@pytest.mark.parametrize("has_warm_up", [False, True])
def test_an_engine_that_has_decoded_single_requests_is_believed_to_be_quick_with_more(has_warm_up: bool) -> None:
    # A slope that is believed to be steep would keep requests away, and so never be measured.
    fit, rng = StepCostFit(), random.Random(6)
    if has_warm_up:
        run(fit, [StepShape(1, 1, 16), StepShape(8, 8, 128)], 10, rng)
    run(fit, [StepShape(1, 1, context) for context in range(1800, 1928)], 256, rng)
    model = fit.model()
    assert model.seconds(StepShape(8, 8, 8 * 1860)) < 2 * model.seconds(StepShape(1, 1, 1860))
    run(fit, [StepShape(8, 8, 8 * 1860)], 32, rng)
    assert worst_error(fit.model(), [StepShape(8, 8, 8 * 1860)]) < 0.1


def test_prompts_of_one_length_do_not_make_longer_ones_seem_slow() -> None:
    # A warm-up on a quiet machine, and then prompts of 256 tokens, alone and in pairs, beside other work: measured.
    fit, rng = StepCostFit(), random.Random(8)
    warm_up = [(StepShape(16, 0, 0, 1, 0, 128), 0.009), (StepShape(128, 0, 0, 1, 0, 8192), 0.025)]
    loaded = [(StepShape(256, 0, 0, 1, 0, 32768), 0.060), (StepShape(512, 0, 0, 2, 0, 65536), 0.105)]
    for steps, num in ((warm_up, 4), (loaded, 150)):
        for _ in range(num):
            shape, seconds = rng.choice(steps)
            fit.observe(shape, seconds * rng.lognormvariate(0, 0.15))
    model = fit.model()
    one = model.seconds(loaded[0][0])
    assert one == pytest.approx(0.060, rel=0.1)
    chunks = [StepShape(512, 0, 0, 1, 0, 131072), StepShape(512, 0, 0, 1, 512, 393216)]
    # They took 0.115 and 0.185 s. Too quick is no harm: such prompts come, and are measured.
    assert 0.7 * 0.3 < sum(map(model.seconds, chunks)) < 1.2 * 0.3


def test_what_only_a_warm_up_has_shown_takes_longer_under_load_as_the_other_steps_do() -> None:
    # Measured on two cores: a warm-up, prompts of 256 tokens beside other work, and then others.
    fit, rng = StepCostFit(), random.Random(10)
    short, long = StepShape(64, 0, 0, 1, 0, 2048), StepShape(512, 0, 0, 1, 512, 393216)
    warm_up = [
        (StepShape(1, 1, 20), 0.0055),
        (StepShape(16, 0, 0, 1, 0, 128), 0.007),
        (StepShape(128, 0, 0, 1, 0, 8192), 0.0155),
        (StepShape(512, 0, 0, 1, 0, 131072), 0.049),
        (long, 0.072),
    ]
    loaded = [(StepShape(256, 0, 0, 1, 0, 32768), 0.0395), (StepShape(512, 0, 0, 2, 0, 65536), 0.071)]
    for steps, num in ((warm_up, 20), (loaded, 300)):
        for _ in range(num):
            shape, seconds = rng.choice(steps)
            fit.observe(shape, seconds * rng.lognormvariate(0, 0.05))
        fit.end_warm_up()
    for model in (fit.model(), fit.lasting_model()):
        assert model.seconds(short) == pytest.approx(0.0155, rel=0.15)
        assert model.seconds(long) == pytest.approx(0.101, rel=0.15)
    # The machine is quiet again: what is not run follows.
    for _ in range(300):
        shape, seconds = rng.choice(loaded)
        fit.observe(shape, 0.7 * seconds * rng.lognormvariate(0, 0.05))
    assert fit.model().seconds(long) == pytest.approx(0.072, rel=0.15)
    # Its own steps outweigh the warm-up's.
    for _ in range(300):
        fit.observe(long, 0.2 * rng.lognormvariate(0, 0.05))
    assert fit.model().seconds(long) == pytest.approx(0.2, rel=0.1)


def test_tokens_before_a_chunk_are_not_blamed_for_the_attention_of_large_chunks() -> None:
    # Else the bound of a step would leave hardly a token for the next chunk of a long prompt. Measured, as above.
    fit, rng = StepCostFit(), random.Random(11)
    small = StepShape(16, 0, 0, 1, 1024, 16 * 1032)
    first, second = StepShape(512, 0, 0, 1, 0, 131072), StepShape(512, 0, 0, 1, 512, 393216)
    warm_up = [(StepShape(16, 0, 0, 1, 0, 128), 0.007), (first, 0.049), (second, 0.072), (small, 0.0085)]
    for steps, num in ((warm_up, 2), ([(first, 0.070), (second, 0.101)], 100)):
        for _ in range(num):
            for shape, seconds in steps:
                fit.observe(shape, seconds * rng.lognormvariate(0, 0.05))
        fit.end_warm_up()
    model = fit.model()
    assert model.seconds(second) == pytest.approx(0.101, rel=0.1)
    before = StepShape(16, 0, 0, 1, 0, 128)
    # It would be 0.062 s if the context were blamed for all that the second chunk takes longer.
    assert model.seconds(small) - model.seconds(before) < 0.004


def test_pairs_of_long_prompts_are_found() -> None:
    # Half of the time of the longest chunks is attention.
    chunks = [(chunk, before) for chunk in (512, 2048) for before in (0, 2048, 8192, 16384, 32768)]
    shapes = [StepShape(chunk, 0, 0, 1, before, chunk * (before + chunk / 2)) for chunk, before in chunks]

    def seconds(shape: StepShape) -> float:
        return 0.010 + shape.num_tokens * 50e-6 + shape.num_prefill_pairs * 1.5e-9

    fit, rng = StepCostFit(), random.Random(9)
    for _ in range(300):
        shape = rng.choice(shapes)
        fit.observe(shape, seconds(shape) * rng.lognormvariate(0, 0.03))
    errors = [fit.model().seconds(shape) / seconds(shape) - 1 for shape in shapes]
    assert max(map(abs, errors)) < 0.1


def test_steps_that_waited_for_the_machine_hardly_count() -> None:
    fit, rng = StepCostFit(), random.Random(4)
    for number in range(640):
        shape = rng.choice(DECODES)
        fit.observe(shape, true_seconds(shape) * (20 if number % 25 == 7 else 1))
    model = fit.model()
    assert worst_error(model, DECODES) < 0.15
    assert model.num_drifts == 0


def test_a_model_without_steps_is_not_sure_and_predicts_nothing() -> None:
    model = StepCostFit().model()
    assert not model.is_sure
    assert model.seconds(DECODES[0]) == 0


def test_a_prior_is_believed_until_own_steps_contradict_it() -> None:
    donor, rng = StepCostFit(), random.Random(5)
    run(donor, DECODES + PREFILLS, 500, rng)
    fit = StepCostFit(donor.model())
    assert worst_error(fit.model(), DECODES + PREFILLS) < 0.08
    run(fit, DECODES, 200, rng, factor=3.0)
    assert worst_error(fit.model(), DECODES, factor=3.0) < 0.1
    assert (fit.num_own_steps, fit.model().num_steps) == (200, 700)
    prefill = fit.model().residuals[1]
    assert prefill == donor.model().residuals[1], "errors of another kind are those of the prior"


def test_a_prior_is_not_believed_about_kinds_of_which_it_has_a_guess_only() -> None:
    # A decode engine saw one prompt, at its start, which took fifty times as long as prompts do.
    donor, rng = StepCostFit(), random.Random(11)
    run(donor, DECODES, 500, rng)
    run(donor, PREFILLS[-1:], 1, rng, factor=50.0)
    fit = StepCostFit(donor.model())
    assert worst_error(fit.model(), DECODES) < 0.08
    run(fit, PREFILLS, 200, rng)
    assert worst_error(fit.model(), PREFILLS) < 0.1
    assert worst_error(fit.model(), DECODES) < 0.4, "steps with more requests than the engine ever had are guesses"
    assert fit.model().is_sure


def test_a_model_that_predicts_badly_is_not_sure() -> None:
    fit, rng = StepCostFit(), random.Random(6)
    for _ in range(640):
        fit.observe(DECODES[0], rng.choice([0.001, 0.01, 0.1]))
    assert not fit.model().is_sure


def test_predictions_that_rest_on_no_step_of_their_kind_do_not_keep_a_model_unsure() -> None:
    # A decode engine computes a few prompts at its start, for its canary, and then none.
    fit, rng = StepCostFit(), random.Random(10)
    for _ in range(16):
        fit.observe(StepShape(4, 4, 4000), rng.uniform(1.0, 2.0))
    run(fit, PREFILLS[:1], 3, rng)
    run(fit, DECODES, 1000, rng)
    assert fit.model().is_sure
    run(fit, PREFILLS, 200, rng)
    assert 0 < fit.model().residuals[1].sigma < 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_durations_that_cannot_be_are_ignored(seconds: float) -> None:
    fit = StepCostFit()
    fit.observe(DECODES[0], seconds)
    assert fit.model().num_steps == 0


def test_more_work_never_takes_less_time() -> None:
    fit, rng = StepCostFit(), random.Random(7)
    for _ in range(200):
        fit.observe(rng.choice(DECODES + PREFILLS), rng.uniform(0.001, 0.1))
    assert all(one >= 0 for one in fit.model().coefficients)
    assert len(fit.model().coefficients) == len(FEATURES)
