"""The budget of prompts beside decodes: the ITL aim holds where it can, and prompts go on all the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import EngineRoleName
from actors.core.outputs.model_runner_output import DraftTokenIds
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.scheduler import Scheduler
from actors.core.steps.chunk_budget import MIN_CHUNK_PART, StepCosts
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import FEATURES, HINGES, StepShape
from tests.actors.core.builders import Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, reference_tokens

MAX_TOKENS = 640
MIN_CHUNK = int(MAX_TOKENS * MIN_CHUNK_PART)
COSTS = st.floats(0, 1).map(lambda part: 0.0 if part < 0.2 else 10 ** (-8 + 4 * part))
MODELS = st.lists(COSTS, min_size=len(FEATURES), max_size=len(FEATURES)).map(
    lambda costs: model(dict(zip(FEATURES, costs, strict=True)))
)


def model(costs: Mapping[str, float], *, num_steps: int = 100, high: float = 0.0, error: float = 0.1) -> StepCostModel:
    """Make a sure model with these coefficients. high, error: Residuals.high and median_size of mixed steps"""
    residuals = (Residuals("decode", num_steps), Residuals("prefill"), Residuals("mixed", num_steps, high=high))
    residuals = (*residuals[:2], replace(residuals[2], median_size=error))
    return StepCostModel(tuple(costs.get(name, 0.0) for name in FEATURES), residuals)


TEN_AND_ONE_MS = {"step": 10e-3, "token": 1e-3}
PER_TOKEN = model(TEN_AND_ONE_MS)


def scheduler_with(
    itl_s: float | None,
    cost_model: StepCostModel | None,
    role: EngineRoleName = "both",
    *,
    is_chunking: bool = True,
    clock: Clock | None = None,
) -> Scheduler:
    scheduler = make_scheduler(
        num_blocks=1024,
        max_model_len=2048,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=16,
        enable_chunked_prefill=is_chunking,
        clock=clock or Clock(),
    )
    scheduler.chunk_budget.set_aims(itl_s)
    scheduler.chunk_budget.set_role(role)
    if cost_model is not None:
        scheduler.chunk_budget.use_model(cost_model)
    return scheduler


def decoding(driver: Driver, num_requests: int = 1, num_tokens: int = 8) -> None:
    for number in range(num_requests):
        driver.scheduler.add_request(make_request(f"d{number}", num_tokens, max_tokens=400, ignore_eos=True))
    for _ in range(num_requests):
        driver.step()


def first_chunk(scheduler: Scheduler) -> int:
    """Return the tokens that a long prompt gets in its first step beside one decode."""
    driver = Driver(scheduler)
    decoding(driver)
    scheduler.add_request(make_request("long", 1500))
    driver.step()
    assert driver.scheduled()["d0"] == 1
    return driver.scheduled().get("long", 0)


def shape_of(output: SchedulerOutput) -> StepShape:
    return StepShape.of_batch(output.batch.num_new_tokens, output.batch.num_computed_tokens)


@pytest.mark.parametrize(
    ("role", "expected"),
    [("both", 99), ("decode", 154), ("prefill", 154), ("encode", 154)],
)
def test_a_step_with_decodes_may_take_twice_the_aim_and_half_as_long_again_where_roles_are_split(
    role: EngineRoleName, expected: int
) -> None:
    # A step takes 10 ms and 1 ms a token, one of which decodes. How much steps differ from that changes no bound.
    cost_model = model(TEN_AND_ONE_MS, high=0.2)
    assert first_chunk(scheduler_with(0.055, cost_model, role)) == expected


@pytest.mark.parametrize(
    ("ages_s", "ttft_s", "expected"),
    [([1.9], 2.0, 99), ([2.1], 2.0, 4 * 110 - 11), ([2.1, 1.9], 2.0, 98), ([2.1], None, 99)],
    ids=["in time", "late", "one of two in time", "no aim for the first token"],
)
def test_steps_may_take_four_times_as_long_where_each_first_token_was_late(
    ages_s: list[float], ttft_s: float | None, expected: int
) -> None:
    clock = Clock()
    driver = Driver(scheduler_with(0.055, PER_TOKEN, clock=clock))
    driver.scheduler.chunk_budget.set_aims(0.055, ttft_s)
    for number, age_s in enumerate(ages_s):
        request = make_request(f"d{number}", 8, max_tokens=400, ignore_eos=True, arrival_time_s=clock.now_s - age_s)
        driver.scheduler.add_request(request)
    for _ in range(2):
        driver.step()
    # Only the first token counts: who was in time is so for as long as it decodes.
    clock.now_s += 60.0
    driver.scheduler.add_request(make_request("long", 1500, arrival_time_s=clock.now_s))
    driver.step()
    assert driver.scheduled()["long"] == expected
    num_in_time = sum(ttft_s is None or age_s <= ttft_s for age_s in ages_s)
    report = driver.scheduler.make_stats().load_report
    assert report is not None
    assert report.num_decodes_in_time == num_in_time


@pytest.mark.parametrize(
    ("num_in_time", "prompt_ages_s", "outputs", "expected"),
    [
        (4, [2.1], 0, 4 * 110 - 10 - 4),
        (5, [2.1], 0, 110 - 10 - 5),
        (5, [2.1, 0.0], 0, 4 * 110 - 10 - 5),
        (4, [1.9, 1.9], 0, 110 - 10 - 4),
        (1, [2.1], 5, 110 - 10 - 1),
    ],
    ids=[
        "one outweighs four",
        "one against five",
        "those behind it count",
        "in time yet",
        "it has had its first token",
    ],
)
def test_late_prompts_outweigh_those_that_decode_in_time(
    num_in_time: int, prompt_ages_s: list[float], outputs: int, expected: int
) -> None:
    clock = Clock()
    driver = Driver(scheduler_with(0.055, PER_TOKEN, clock=clock))
    driver.scheduler.chunk_budget.set_aims(0.055, 2.0)
    for number in range(num_in_time):
        request = make_request(f"d{number}", 8, max_tokens=400, ignore_eos=True, arrival_time_s=clock.now_s)
        driver.scheduler.add_request(request)
    for _ in range(2):
        driver.step()
    for number, age_s in enumerate(prompt_ages_s):
        arrival_s = clock.now_s - age_s
        request = make_request(
            f"p{number}", 1500, max_tokens=9, output_token_ids=[1] * outputs, arrival_time_s=arrival_s
        )
        driver.scheduler.add_request(request)
    # The first of these steps finds the prompts waiting, the second one finds one that is computed.
    for _ in range(2):
        driver.step()
        assert driver.scheduled()["p0"] == expected


def test_a_report_right_after_a_prompt_counts_its_request_as_in_time() -> None:
    driver = Driver(scheduler_with(0.055, PER_TOKEN))
    driver.scheduler.chunk_budget.set_aims(0.055, 2.0)
    decoding(driver)
    report = driver.scheduler.make_stats().load_report
    assert report is not None
    assert (report.num_decodes, report.num_decodes_in_time) == (1, 1)


def test_the_role_may_change_while_the_engine_runs() -> None:
    driver = Driver(scheduler_with(0.055, PER_TOKEN, "both"))
    decoding(driver)
    driver.scheduler.add_request(make_request("long", 1500))
    chunks = []
    for role in ("both", "prefill", "both"):
        driver.scheduler.chunk_budget.set_role(role)
        driver.step()
        chunks.append(driver.scheduled()["long"])
    assert chunks == [99, 154, 99]


@pytest.mark.parametrize(
    "scheduler",
    [
        scheduler_with(None, PER_TOKEN),
        scheduler_with(0.055, None),
        scheduler_with(0.055, model(TEN_AND_ONE_MS, num_steps=10)),
        scheduler_with(0.055, model(TEN_AND_ONE_MS, error=0.5)),
    ],
    ids=["no aim", "no model", "a model of few steps", "a model that predicts badly"],
)
def test_without_an_aim_or_a_sure_model_the_token_budget_alone_bounds_a_step(scheduler: Scheduler) -> None:
    assert scheduler.chunk_budget.bound_s is None
    assert first_chunk(scheduler) == MAX_TOKENS - 1


def test_prompts_that_must_not_be_cut_are_not() -> None:
    scheduler = scheduler_with(0.020, PER_TOKEN, is_chunking=False)
    driver = Driver(scheduler)
    decoding(driver)
    scheduler.add_request(make_request("long", 500))
    driver.step()
    assert driver.scheduled()["long"] == 500


def test_a_step_without_decodes_delays_nobody_and_is_not_bounded() -> None:
    scheduler = scheduler_with(0.020, PER_TOKEN, "decode")
    driver = Driver(scheduler)
    scheduler.add_request(make_request("long", 1500))
    driver.step()
    assert driver.scheduled() == {"long": MAX_TOKENS}


def test_prefill_never_starves_although_the_decodes_alone_miss_the_aim() -> None:
    scheduler = scheduler_with(0.001, PER_TOKEN, "decode")
    driver = Driver(scheduler)
    decoding(driver, 3)
    for name in ("first", "second"):
        scheduler.add_request(make_request(name, 100, max_tokens=1))
    driver.step()
    assert driver.scheduled() == {"d0": 1, "d1": 1, "d2": 1, "first": MIN_CHUNK}
    for _ in range(5):
        driver.step()
    assert "first" not in scheduler.requests
    assert scheduler.requests.keys() == {"d0", "d1", "d2"}, "6 steps of 40 tokens are enough for both"


def test_the_prompts_of_a_step_share_its_budget() -> None:
    scheduler = scheduler_with(0.055, PER_TOKEN)
    driver = Driver(scheduler)
    decoding(driver)
    for name in ("short", "long", "later"):
        scheduler.add_request(make_request(name, 60 if name == "short" else 500))
    driver.step()
    assert driver.scheduled() == {"d0": 1, "short": 60, "long": 39}


def test_draft_tokens_count_and_are_not_bounded() -> None:
    scheduler = make_scheduler(
        num_blocks=512, max_model_len=1024, max_num_batched_tokens=MAX_TOKENS, num_speculative_tokens=3
    )
    scheduler.chunk_budget.set_aims(0.055)
    scheduler.chunk_budget.use_model(PER_TOKEN)
    driver = Driver(scheduler)
    decoding(driver)
    request = scheduler.requests["d0"]
    drafts = reference_tokens(request.all_token_ids, 3, eos=-1)
    scheduler.update_draft_token_ids(DraftTokenIds(["d0"], [drafts]))
    scheduler.add_request(make_request("long", 500))
    driver.step()
    assert driver.scheduled() == {"d0": 4, "long": 96}


@settings(max_examples=150, deadline=None)
@given(
    cost_model=MODELS,
    num_tokens=st.integers(1, 700),
    before=st.integers(0, 100_000),
    seconds_left=st.floats(-1e-2, 10),
)
def test_the_largest_chunk_is_within_the_time_and_one_more_token_is_not(
    cost_model: StepCostModel, num_tokens: int, before: int, seconds_left: float
) -> None:
    costs = StepCosts.of(cost_model)

    def seconds(chunk: int) -> float:
        with_chunk = StepShape(num_tokens + chunk, num_prefill_pairs=chunk * (before + chunk / 2))
        return cost_model.seconds(with_chunk) - cost_model.seconds(StepShape(num_tokens))

    most = costs.largest_chunk(num_tokens, before, seconds_left)
    assert most >= 0
    allowed = max(0.0, seconds_left) * (1 + 1e-6) + 1e-9
    assert seconds(int(min(most, 1e7))) <= allowed
    if most < 1e7:
        assert seconds(int(most) + 2) >= max(0.0, seconds_left) * (1 - 1e-6) - 1e-9
    assert costs.tokens(num_tokens) == pytest.approx(
        sum(cost * max(0, num_tokens - hinge) for hinge, cost in _hinge_costs(cost_model)), abs=1e-12
    )


def _hinge_costs(cost_model: StepCostModel) -> list[tuple[int, float]]:
    cost = cost_model.seconds_by_feature
    return [(0, cost["token"]), *((hinge, cost[f"token_above_{hinge}"]) for hinge in HINGES)]


ARRIVALS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    cost_model=MODELS,
    itl_s=st.floats(1e-5, 0.2),
    role=st.sampled_from(["prefill", "decode", "both"]),
    arrivals=ARRIVALS,
    gap=st.integers(0, 3),
)
def test_the_predicted_step_is_within_the_bound_wherever_more_than_the_least_progress_is_made(
    cost_model: StepCostModel, itl_s: float, role: EngineRoleName, arrivals: list[tuple[int, int]], gap: int
) -> None:
    runs = []
    for _ in range(2):
        driver = Driver(scheduler_with(itl_s, cost_model, role))
        bound_s = driver.scheduler.chunk_budget.bound_s
        assert bound_s is not None
        for number, (num_tokens, max_tokens) in enumerate(arrivals):
            driver.scheduler.add_request(make_request(f"r{number}", num_tokens, max_tokens=max_tokens))
            for _ in range(gap):
                _step_within(driver, cost_model, bound_s)
        while driver.scheduler.has_requests():
            _step_within(driver, cost_model, bound_s)
        for number, (num_tokens, max_tokens) in enumerate(arrivals):
            request = make_request(f"r{number}", num_tokens)
            assert driver.tokens_of(f"r{number}") == reference_tokens(request.prompt_token_ids, max_tokens)
        runs.append([step.num_scheduled_tokens for step in driver.steps])
    assert runs[0] == runs[1], "the same requests get the same steps"


def _step_within(driver: Driver, cost_model: StepCostModel, bound_s: float) -> None:
    num_prompt = {request_id: request.num_prompt_tokens for request_id, request in driver.scheduler.requests.items()}
    unread = [one for one in driver.scheduler.requests.values() if one.num_computed_tokens < one.num_prompt_tokens]
    reads, chunks, decodes, num_single = 0, 0, 0, 0
    driver.step()
    batch = driver.steps[-1].batch
    for request_id, new, before in zip(batch.req_ids, batch.num_new_tokens, batch.num_computed_tokens, strict=True):
        if before < num_prompt[request_id]:
            reads += int(new)
            # A prompt's single token is not bounded: it costs what a decode costs.
            chunks += int(new) if new > 1 else 0
            num_single += int(new == 1)
        else:
            decodes += 1
    assert reads + decodes <= MAX_TOKENS
    assert bool(reads) is bool(unread), "a waiting prompt always makes progress"
    if decodes and chunks > MIN_CHUNK:
        allowed_s = bound_s + num_single * _single(cost_model)
        assert cost_model.seconds(shape_of(driver.steps[-1])) <= allowed_s * (1 + 1e-6)


def _single(cost_model: StepCostModel) -> float:
    """Return the most seconds of a step's further token of a prompt of at most 400 tokens."""
    cost = cost_model.seconds_by_feature
    hinges = sum(seconds for name, seconds in cost.items() if name.startswith("token"))
    return hinges + cost["decode"] + cost["decode_context_token"] * 400


def test_an_infinite_chunk_is_no_error() -> None:
    costs = StepCosts.of(model({"step": 1e-3}))
    assert costs.largest_chunk(4, 0, 1.0) == math.inf
    assert costs.largest_chunk(4, 0, -1.0) == 0
