"""A chunk has the right items encoded and is cut in the right place, and the worker has what every chunk needs."""

from __future__ import annotations

import random
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from actors.config import SchedulerConfig
from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.encoder.encoder_scheduling import (
    EncoderInputs,
    EncoderStep,
    find_encoder_refusal,
    schedule_encoder_inputs,
)
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.multimodal import MultiModalFeature
from actors.core.requests.request import FinishReason, RequestStatus
from actors.core.vllm_view import free_encoder_input_ids
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, reference_tokens

FEATURES = [MultiModalFeature("a", 2, 4, 4), MultiModalFeature("b", 8, 6, 6), MultiModalFeature("a", 16, 4, 4)]


@pytest.mark.parametrize(
    ("num_computed", "num_new", "budget", "cache_size", "expected"),
    [
        pytest.param(0, 2, 16, 16, EncoderInputs([], [], 2, 0), id="text only"),
        pytest.param(0, 3, 16, 16, EncoderInputs([0], [], 3, 4), id="an item is begun"),
        pytest.param(0, 20, 16, 16, EncoderInputs([0, 1], [], 20, 10), id="equal items are encoded once"),
        pytest.param(0, 20, 9, 16, EncoderInputs([0], [], 8, 4), id="the budget cuts before the second"),
        pytest.param(0, 20, 16, 9, EncoderInputs([0], [], 8, 4), id="the cache cuts before the second"),
        pytest.param(0, 20, 3, 16, EncoderInputs([], [], 2, 0), id="the budget cuts before the first"),
        pytest.param(4, 3, 3, 16, EncoderInputs([], [], 0, 0), id="inside of an item there is nothing to cut"),
        pytest.param(6, 2, 0, 16, EncoderInputs([], [], 2, 0), id="what is passed costs nothing"),
        pytest.param(14, 8, 16, 16, EncoderInputs([2], [], 8, 4), id="an item that comes again"),
    ],
)
def test_a_chunk_is_cut_before_the_first_item_that_cannot_be_encoded(
    num_computed: int, num_new: int, budget: int, cache_size: int, expected: EncoderInputs
) -> None:
    request = make_request("r", 24, mm_features=FEATURES)
    cache = EncoderCacheManager(cache_size)
    assert schedule_encoder_inputs(request, num_computed, num_new, budget, cache) == expected


def test_what_is_cached_costs_nothing_and_is_held() -> None:
    cache = EncoderCacheManager(16)
    cache.allocate(make_request("other", 24, mm_features=FEATURES), 0)
    request = make_request("r", 24, mm_features=FEATURES)
    assert schedule_encoder_inputs(request, 0, 12, 6, cache) == EncoderInputs([1], [0], 12, 6)
    assert cache.get_cached_input_ids(request) == {0}


def test_what_an_earlier_chunk_holds_stays_held_when_the_next_one_is_given_up() -> None:
    request = make_request("r", 24, mm_features=FEATURES)
    step = EncoderStep(EncoderCacheManager(16), budget=16)
    step.take(request, step.choose(request, 0, 3), 0)
    chosen = step.choose(request, 3, 6)
    assert chosen == EncoderInputs([1], [], 6, 6)
    step.give_up(request, chosen)
    assert step.cache.get_cached_input_ids(request) == {0}


@st.composite
def items(draw: st.DrawFn) -> list[MultiModalFeature]:
    """Draw a prompt's items: equal names have equal sizes."""
    features: list[MultiModalFeature] = []
    for size in draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)):
        offset = (features[-1].end if features else 0) + draw(st.integers(0, 3))
        name = f"{size}-{draw(st.integers(0, 1))}"
        features.append(MultiModalFeature(name, offset, draw(st.integers(1, 6)), size))
    return features


@settings(max_examples=200, deadline=None)
@given(items(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40))
def test_what_is_admitted_gets_on_with_every_full_budget(
    features: list[MultiModalFeature], budget: int, cache_size: int, chunk: int
) -> None:
    num_tokens = features[-1].end + 1
    request = make_request("r", num_tokens, mm_features=features)
    config = SchedulerConfig(max_num_encoder_input_tokens=budget, encoder_cache_size=cache_size)
    if find_encoder_refusal(request, config) is not None:
        assert max(feature.num_embeds for feature in features) > min(budget, cache_size)
        return
    cache = EncoderCacheManager(cache_size)
    num_computed = 0
    while num_computed < num_tokens:
        step = EncoderStep(cache, budget)
        chosen = step.choose(request, num_computed, min(chunk, num_tokens - num_computed))
        assert chosen.num_new_tokens > 0
        step.take(request, chosen, num_computed)
        assert step.budget >= 0
        num_computed += chosen.num_new_tokens
        for input_id, feature in enumerate(features):
            if feature.offset < num_computed < feature.end:
                assert input_id in cache.get_cached_input_ids(request)
            if feature.end <= num_computed:
                cache.free_encoder_input(request, input_id)
        cache.check_integrity()


def test_what_can_never_be_encoded_is_refused_with_the_numbers() -> None:
    request = make_request("r", 24, mm_features=FEATURES)
    assert find_encoder_refusal(request, SchedulerConfig()) is None
    refusal = find_encoder_refusal(request, SchedulerConfig(encoder_cache_size=5))
    assert refusal == (
        "multimodal item 1 has 6 embeddings, a step takes max_num_encoder_input_tokens = 2048 and the cache "
        "encoder_cache_size = 5"
    )
    whole = SchedulerConfig(enable_chunked_prefill=False, max_num_encoder_input_tokens=9)
    assert "the prompt's items have 10 embeddings" in (find_encoder_refusal(request, whole) or "")


def test_items_are_encoded_once_and_let_go_when_their_requests_are_past_them() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=10))
    requests = {
        name: make_request(name, 24, mm_features=FEATURES, max_tokens=2, ignore_eos=True) for name in ("r", "s")
    }
    for request in requests.values():
        driver.scheduler.add_request(request)
    passed = []
    while driver.scheduler.has_requests():
        driver.step()
        passed += free_encoder_input_ids(driver.steps[-1], requests)
    assert sorted(passed) == [(name, input_id) for name in ("r", "s") for input_id in range(3)]
    assert driver.worker.num_encoded == 2
    assert driver.scheduler.encoder_cache_manager.num_freeable_slots == 16


def test_a_request_that_is_not_admitted_holds_no_embeddings() -> None:
    driver = Driver(make_scheduler(num_blocks=8))
    driver.scheduler.add_request(make_request("r", 24, max_tokens=8, ignore_eos=True))
    driver.step()
    driver.scheduler.add_request(make_request("s", 24, mm_features=FEATURES, max_tokens=2))
    driver.step()
    assert driver.scheduler.encoder_cache_manager.holders() == set()
    driver.run()


def test_what_cannot_be_encoded_here_is_given_back_unless_its_kv_is_cached() -> None:
    driver = Driver(make_scheduler())
    prompt = range(500, 524)
    resumed, cached = (make_request(name, prompt, mm_features=FEATURES) for name in ("resumed", "cached"))
    resumed.encoder_inputs = cached.encoder_inputs = ()
    for request in (resumed, make_request("behind", prompt, mm_features=FEATURES)):
        driver.scheduler.add_request(request)
    driver.run()
    ends = {output.request_id: output for output in driver.outputs if output.finished}
    assert (ends["resumed"].finish_reason, ends["resumed"].end_cause) == (FinishReason.ERROR, EndCause.INPUTS_MISSING)
    assert (ends["behind"].finish_reason, ends["behind"].end_cause) == (FinishReason.LENGTH, None)
    assert FEATURES[-1].end <= 23 // driver.scheduler.block_size * driver.scheduler.block_size
    driver.scheduler.add_request(cached)
    driver.run()
    assert len(driver.tokens_of("cached")) == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_chunk_finds_its_embeddings_under_pressure(policy: str, overlap: bool) -> None:
    generator = random.Random(3)
    driver = Driver(
        make_scheduler(
            num_blocks=16,
            max_num_batched_tokens=12,
            policy="priority" if policy == "priority" else "fcfs",
            overlap=overlap,
            encoder_budget=7,
            encoder_cache_size=8,
        )
    )
    prompts = {}
    for number in range(30):
        features, offset = [], generator.randrange(4)
        for _ in range(generator.randrange(3)):
            size = generator.randrange(1, 7)
            features.append(MultiModalFeature(f"{size}-{generator.randrange(3)}", offset, size, size))
            offset += size + generator.randrange(3)
        name = f"r{number}"
        prompts[name] = range(100 * number, 100 * number + offset + generator.randrange(1, 9))
        driver.scheduler.add_request(
            make_request(
                name,
                prompts[name],
                mm_features=features,
                max_tokens=generator.randrange(1, 12),
                priority=generator.randrange(3),
                ignore_eos=True,
            )
        )
        if number % 5 == 4:
            driver.scheduler.finish_requests(f"r{number - 2}", RequestStatus.FINISHED_ABORTED)
        for _ in range(generator.randrange(5)):
            driver.step()
    driver.run()
    for name, prompt in prompts.items():
        tokens = driver.tokens_of(name)
        assert tokens == reference_tokens(prompt, len(tokens), eos=-1)
    assert driver.scheduler.make_stats().num_preemptions > 0
    assert driver.scheduler.encoder_cache_manager.holders() == set()


def test_whom_an_image_of_a_victim_is_left_to_encodes_it_only_in_a_step_that_it_is_in() -> None:
    """The urgent request counts on the image that the other one encodes, preempts it, and waits for its blocks."""
    driver = Driver(
        make_scheduler(num_blocks=6, policy="priority", long_prefill_token_threshold=4, max_num_batched_tokens=16)
    )
    early, late = (MultiModalFeature("image", offset, 4, 4) for offset in (8, 12))
    scheduler = driver.scheduler
    scheduler.add_request(make_request("low", 16, priority=1, mm_features=[late], max_tokens=2))
    # While it waits, prompts are computed in chunks of four tokens.
    scheduler.add_request(make_request("behind", 22, priority=2, max_tokens=2))
    driver.step()
    scheduler.add_request(make_request("urgent", 16, priority=0, mm_features=[early], max_tokens=2))
    under_way = deque(scheduler.schedule() for _ in range(3))
    assert under_way[-1].preempted_req_ids == {"low"}
    while scheduler.has_requests():
        output = under_way.popleft()
        assert output.scheduled_encoder_inputs.keys() <= output.num_scheduled_tokens.keys()
        scheduler.update_from_output(output, driver.worker.execute(output))
        under_way.append(scheduler.schedule())
    assert driver.worker.num_encoded <= 2


def test_an_image_that_is_left_to_a_request_is_encoded_beside_its_own() -> None:
    cache = EncoderCacheManager(8)
    step = EncoderStep(cache, budget=8)
    shared, own = MultiModalFeature("shared", 0, 2, 2), MultiModalFeature("own", 4, 2, 2)
    first, second, third = (
        make_request(name, 8, mm_features=features)
        for name, features in (("first", [shared]), ("second", [shared, own]), ("third", [shared]))
    )
    step.take(first, step.choose(first, 0, 8), 0)
    chosen = step.choose(second, 0, 8)
    step.refund(first)
    step.take(second, chosen, 0)
    assert sorted(step.inputs["second"]) == [0, 1]
    step.give_up(third, step.choose(third, 0, 8))
    step.refund(second)
    assert (step.inputs, step.budget, cache.num_free_slots) == ({}, 8, 8)


def test_an_image_goes_on_to_the_next_who_reads_it_when_its_heir_is_not_scheduled() -> None:
    cache = EncoderCacheManager(8)
    step = EncoderStep(cache, budget=8)
    requests = [make_request(name, 4, mm_features=[MultiModalFeature("i", 0, 2, 2)]) for name in ("a", "b", "c")]
    step.take(requests[0], step.choose(requests[0], 0, 4), 0)
    waiting = step.choose(requests[1], 0, 4)
    step.take(requests[2], step.choose(requests[2], 0, 4), 0)
    step.refund(requests[0])
    assert step.inputs == {"b": [0]}
    step.give_up(requests[1], waiting)
    assert step.inputs == {"c": [0]}
    assert cache.holders() == {"c"}
