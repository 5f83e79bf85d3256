"""Requests with the prompt of one that is here copy its last block, and compute the prompt's last token alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.outputs.scheduler_output import BlockCopy
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHasher
from actors.core.requests.multimodal import MultiModalFeature
from actors.core.requests.request import EngineCoreRequest, Request, RequestStatus
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, loaded, reference_tokens
from tests.actors.core.steps.test_overlap import Pipeline
from tests.kv_transfer.reported import output_of

PROMPT = range(1, 12)
"""Two blocks and three tokens."""


def sample(request_id: str, prompt: Sequence[int] = PROMPT, **kwargs: Any) -> Request:
    return make_request(request_id, prompt, **{"max_tokens": 6, "ignore_eos": True, **kwargs})


def with_leader(prompt: Sequence[int] = PROMPT, num_steps: int = 2, **kwargs: Any) -> Driver:
    driver = Driver(make_scheduler(**kwargs))
    driver.scheduler.add_request(sample("leader", prompt))
    for _ in range(num_steps):
        driver.step()
    return driver


def assert_all_right(driver: Driver, *requests: Request) -> None:
    driver.run()
    for request in requests:
        right = reference_tokens(request.prompt_token_ids, request.max_tokens, eos=-1)
        assert driver.tokens_of(request.request_id) == right[-len(driver.tokens_of(request.request_id)) :]
        assert request.output_token_ids == right
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks


def test_samples_copy_the_last_block_in_one_step_and_compute_one_token_each() -> None:
    driver = with_leader()
    samples = [sample(f"s{index}") for index in range(3)]
    for request in samples:
        driver.scheduler.add_request(request)
    driver.step()
    blocks_of = driver.scheduler.kv_cache_manager.get_block_ids
    assert driver.steps[-1].block_copies == [BlockCopy(blocks_of("leader")[2], blocks_of(f"s{i}")[2]) for i in range(3)]
    assert driver.scheduled() == {"leader": 1, "s0": 1, "s1": 1, "s2": 1}
    assert [request.num_cached_tokens for request in samples] == [10] * 3
    assert [request.num_prompt_tokens_computed for request in samples] == [1] * 3
    assert_all_right(driver, *samples)


def test_a_prompt_of_whole_blocks_has_its_last_one_copied() -> None:
    driver = with_leader(range(1, 9))
    request = sample("s", range(1, 9))
    driver.scheduler.add_request(request)
    driver.step()
    blocks_of = driver.scheduler.kv_cache_manager.get_block_ids
    assert driver.steps[-1].block_copies == [BlockCopy(blocks_of("leader")[1], blocks_of("s")[1])]
    assert driver.scheduled() == {"leader": 1, "s": 1}
    assert_all_right(driver, request)


@pytest.mark.parametrize("num_tokens", [1, 5, 9])
def test_the_only_token_of_a_last_block_is_computed(num_tokens: int) -> None:
    driver = with_leader(range(1, num_tokens + 1))
    request = sample("s", range(1, num_tokens + 1))
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.steps[-1].block_copies == []
    assert driver.scheduled() == {"leader": 1, "s": 1}
    assert_all_right(driver, request)


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "salt"},
        {"lora_name": "adapter"},
        {"prompt": [1, 2, 3]},
        {"prompt": [*range(1, 11), 99]},
        {"prompt": [*range(1, 11)]},
        {"prompt": range(1, 16)},
    ],
    ids=str,
)
def test_only_the_same_prompt_is_copied(other: dict[str, Any]) -> None:
    driver = with_leader()
    request = sample("s", **other)
    driver.scheduler.add_request(request)
    driver.run()
    assert driver.worker.num_copied == 0
    assert request.output_token_ids == reference_tokens(request.prompt_token_ids, 6, eos=-1)


@pytest.mark.parametrize("key", ["lora_name", "cache_salt"])
def test_a_prompt_of_less_than_a_block_is_kept_apart_too(key: str) -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(sample("leader", range(1, 4), max_tokens=20, **{key: "x"}))
    driver.step()
    for name in ("y", "x"):
        driver.scheduler.add_request(sample(name, range(1, 4), **{key: name}))
        driver.step()
        assert driver.worker.num_copied == (name == "x")


def test_the_same_end_of_another_prompt_is_not_copied() -> None:
    driver = with_leader([21, 22, 23, 24, *PROMPT[4:]], num_steps=20)
    driver.scheduler.add_request(sample("other"))
    driver.step()
    request = sample("s", [21, 22, 23, 24, *PROMPT[4:]])
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"other": 1, "s": 3}
    assert_all_right(driver, request)


def test_nothing_is_copied_before_the_prompt_is_computed() -> None:
    driver = with_leader(num_steps=1, max_num_batched_tokens=10)
    request = sample("s")
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 3}
    assert_all_right(driver, request)


def test_who_comes_after_the_leaders_end_computes_the_rest_of_the_prompt_and_the_next_copies_that() -> None:
    driver = with_leader(num_steps=20)
    assert "leader" not in driver.scheduler.requests
    driver.scheduler.add_request(sample("s"))
    driver.step()
    assert driver.scheduled() == {"s": 3}
    request = sample("t")
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"s": 1, "t": 1}
    assert driver.worker.num_copied == 1
    assert_all_right(driver, request)


def test_any_sample_that_is_left_has_the_block_that_the_next_one_copies() -> None:
    driver = with_leader()
    driver.scheduler.add_request(sample("s"))
    driver.step()
    driver.scheduler.finish_requests("leader", RequestStatus.FINISHED_ABORTED)
    request = sample("t")
    driver.scheduler.add_request(request)
    driver.step()
    blocks_of = driver.scheduler.kv_cache_manager.get_block_ids
    assert driver.steps[-1].block_copies == [BlockCopy(blocks_of("s")[2], blocks_of("t")[2])]
    assert_all_right(driver, request)


def test_the_leaders_block_is_copied_although_it_has_grown_beyond_the_prompt() -> None:
    driver = with_leader(num_steps=5)
    request = sample("s")
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 1}
    assert_all_right(driver, request)


def test_a_sample_that_has_output_copies_the_prompts_part_and_computes_its_own() -> None:
    driver = with_leader(num_steps=1)
    outputs = reference_tokens(PROMPT, 3, eos=-1)
    request = sample("s", output_token_ids=outputs, max_tokens=8)
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 3}
    assert driver.worker.num_copied == 1
    assert_all_right(driver, request)


def test_a_preempted_leader_leaves_nothing_to_copy() -> None:
    driver = with_leader()
    leader, request = driver.scheduler.requests["leader"], sample("s")
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"leader": 13, "s": 11}
    assert_all_right(driver, leader, request)
    assert driver.worker.num_copied == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leader_that_ends_before_the_copy_keeps_its_block_until_it_is_done(overlap: bool) -> None:
    pipeline = Pipeline(make_scheduler(num_blocks=9, overlap=overlap))
    driver = pipeline.driver
    driver.scheduler.add_request(sample("leader", max_tokens=20))
    for _ in range(2):
        pipeline.schedule()
        pipeline.update()
    request = sample("s", max_tokens=12)
    driver.scheduler.add_request(request)
    [copy] = pipeline.schedule().block_copies
    driver.scheduler.finish_requests("leader", RequestStatus.FINISHED_ABORTED)
    driver.scheduler.check_integrity()
    if overlap:
        # It takes all blocks that it can get, and they are written before the step that copies is taken in.
        driver.scheduler.add_request(sample("other", range(51, 69)))
        assert "other" not in pipeline.schedule().num_scheduled_tokens
    pool = driver.scheduler.kv_cache_manager.block_pool
    assert pool.blocks[copy.source].ref_cnt == 2  # as the leader's, which is fenced, and as a copy's source
    pipeline.run()
    assert driver.tokens_of("s") == reference_tokens(PROMPT, 12, eos=-1)
    assert pool.num_free_blocks == pool.num_blocks


def test_the_source_is_held_from_when_it_is_found() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    leader = sample("leader", range(1, 4))
    assert kv.allocate_slots(leader, 3) is not None
    kv.offer_prompt_tail(leader)
    request = sample("s", range(1, 4))
    partial_hit = kv.find_partial_block(request, [])
    assert partial_hit is not None
    assert partial_hit.num_tokens == 2
    assert kv.allocate_slots(request, 1, partial_hit=partial_hit) is not None
    kv.free(leader)
    assert partial_hit.block.block_id not in [block.block_id for block in kv.block_pool.get_free_blocks(2)]
    assert kv.begin_step(1) == [BlockCopy(0, 1)]
    assert kv.begin_step(2) == []
    kv.end_step(1)
    assert partial_hit.block.ref_cnt == 0


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    driver = with_leader(enable_prefix_caching=False)
    request = sample("s")
    driver.scheduler.add_request(request)
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 11}
    assert driver.worker.num_copied == 0
    assert_all_right(driver, request)


def test_who_wants_something_of_every_prompt_token_computes_all_of_them() -> None:
    driver = with_leader()
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    core_request = EngineCoreRequest(request_id="s", prompt_token_ids=list(PROMPT), sampling_params=params)
    driver.scheduler.add_request(Request.from_engine_core_request(core_request, 0, BlockHasher(BLOCK_SIZE, PUBLIC_KEY)))
    driver.scheduler.add_request(sample("mean", pooling_params=PoolingParams(pooling="mean")))
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 11, "mean": 11}
    assert driver.worker.num_copied == 0


def test_samples_of_a_prompt_that_ends_in_an_image_need_nothing_to_encode() -> None:
    image = MultiModalFeature("image", 6, 4, 4)
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(sample("leader", mm_features=[image]))
    driver.step()
    driver.step()
    request = sample("s", mm_features=[image])
    request.encoder_inputs = ()
    driver.scheduler.add_request(request)
    driver.scheduler.add_request(sample("other", mm_features=[MultiModalFeature("other image", 6, 4, 4)]))
    driver.step()
    assert driver.scheduled() == {"leader": 1, "s": 1, "other": 7}
    assert_all_right(driver, request)


def test_what_was_handed_over_is_copied_too_but_not_by_the_ends_of_a_handoff() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(sample("leader", role=TransferRole.CONSUMER))
    driver.step()
    reservation = connector.loading["leader"]
    driver.worker.write(reservation.block_ids, list(PROMPT), 0, len(PROMPT))
    [first_token] = reference_tokens(PROMPT, 1, eos=-1)
    driver.step(output_of(finished_recving={"leader": loaded(len(PROMPT), first_token)}))
    driver.scheduler.add_request(sample("s"))
    driver.scheduler.add_request(sample("producer", role=TransferRole.PRODUCER))
    driver.scheduler.add_request(sample("consumer", role=TransferRole.CONSUMER))
    driver.step(output_of(ready_to_prefill={"producer"}))
    driver.step()
    assert driver.worker.num_copied == 1
    assert driver.steps[-2].num_scheduled_tokens == {"leader": 1, "s": 1}
    assert driver.scheduled() == {"leader": 1, "s": 1, "producer": 3}
    assert connector.loading["consumer"].num_local_blocks == 2
