"""Pooling requests and prompt embeddings, as far as the scheduler has to do with them."""

from __future__ import annotations

from typing import Literal

import pytest

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.requests.request import FinishReason, PromptEmbeds
from actors.core.requests.sampling_params import PoolingParams
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector

EMBED = PoolingParams()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pooling_request_ends_with_its_vector_when_its_prompt_is_through(overlap: bool) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, overlap=overlap)
    scheduler.add_request(make_request("a", 12, pooling_params=EMBED))
    first = scheduler.schedule()
    second = scheduler.schedule() if overlap else None
    assert scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[]])) == {}
    second = second or scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 8}, {"a": 4})
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    [outputs] = scheduler.update_from_output(
        second, ModelRunnerOutput(["a"], [[]], pooler_output={"a": [0.6, 0.8]})
    ).values()
    [end] = outputs.outputs
    assert (end.finish_reason, end.pooling_output, end.new_token_ids) == (FinishReason.STOP, [0.6, 0.8], [])
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 64


def test_a_model_that_gives_no_vector_is_a_broken_invariant() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, pooling_params=EMBED))
    with pytest.raises(IntegrityError, match="no vector"):
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[]]))


@pytest.mark.parametrize(("pooling", "num_tokens"), [("last", 1), ("mean", 9), ("cls", 9)])
def test_only_a_request_that_is_content_with_its_last_token_reads_the_prefix_cache(
    pooling: Literal["last", "mean", "cls"], num_tokens: int
) -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", range(1, 10), max_tokens=1))
    driver.run()
    driver.scheduler.add_request(make_request("b", range(1, 10), pooling_params=PoolingParams(pooling=pooling)))
    assert driver.scheduler.schedule().num_scheduled_tokens == {"b": num_tokens}


def test_a_pooling_request_is_not_handed_over() -> None:
    driver = Driver(make_scheduler(connector=FakeConnector()))
    driver.scheduler.add_request(make_request("a", 4, pooling_params=EMBED, role=TransferRole.PRODUCER))
    driver.step()
    assert driver.end_of("a").error == "a pooling request has nothing to hand over"


def test_prompt_embeds_go_to_the_worker_and_have_to_fit_the_prompt() -> None:
    embeds = PromptEmbeds(b"\0" * 32, num_tokens=4, hidden_size=2, dtype="float32", digest=b"d")
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", [0, 0, 0, 0], prompt_embeds=embeds))
    driver.scheduler.add_request(make_request("b", [0, 0, 0], prompt_embeds=embeds))
    driver.step()
    assert [new.prompt_embeds for new in driver.steps[0].scheduled_new_reqs] == [embeds]
    assert driver.end_of("b").error == "prompt_embeds has 4 rows for 3 prompt tokens"


@pytest.mark.parametrize("num_tokens", [20, 24])
def test_a_prompt_that_fills_the_pool_is_embedded_with_slots_to_look_ahead(num_tokens: int) -> None:
    """It has no token to look ahead to; those behind it run, too."""
    driver = Driver(make_scheduler(num_blocks=6, num_lookahead_tokens=5, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("v", num_tokens, pooling_params=PoolingParams(pooling="mean")))
    driver.scheduler.add_request(make_request("behind", 4))
    driver.run(max_steps=50)
    assert driver.end_of("v").pooling_output == [float(num_tokens)]
    assert driver.scheduler.make_stats().num_preemptions == 0
