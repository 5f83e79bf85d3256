"""reset_prefix_cache: nothing that was computed before it is ever read again."""

from __future__ import annotations

import pytest

from actors.core.requests.request import RequestStatus
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.actors.core.steps.test_overlap import Pipeline


def test_it_is_refused_while_a_request_holds_blocks() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 8, ignore_eos=True))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.make_stats().prefix_cache_stats.reset
    assert driver.scheduler.kv_cache_manager.block_pool.num_cached_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_it_preempts_all_that_run_on_request(overlap: bool) -> None:
    scheduler = make_scheduler(overlap=overlap)
    pipeline = Pipeline(scheduler)
    prompts = {"a": range(1, 10), "b": range(21, 28)}
    for name, prompt in prompts.items():
        scheduler.add_request(make_request(name, prompt, max_tokens=8, ignore_eos=True))
    for _ in range(3):
        pipeline.schedule()
        pipeline.update()
    pipeline.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.get_request_counts() == (0, 2)
    assert {request.status for request in scheduler.requests.values()} == {RequestStatus.PREEMPTED}
    pipeline.update()
    output = pipeline.schedule()
    assert output.preempted_req_ids == {"a", "b"}
    # Everything is computed anew, in the order of arrival.
    assert {name: output.num_scheduled_tokens[name] for name in prompts} == {"a": 12, "b": 10}
    assert output.batch.num_computed_tokens.tolist() == [0, 0]
    pipeline.run()
    for name, prompt in prompts.items():
        assert pipeline.driver.tokens_of(name) == reference_tokens(prompt, 8, eos=-1)


def test_it_touches_nothing_while_a_transfer_holds_blocks() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector=connector))
    driver.scheduler.add_request(make_request("a", 8, ignore_eos=True))
    driver.scheduler.add_request(make_request("c", 8, role=TransferRole.CONSUMER))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert driver.scheduler.get_request_counts() == (1, 1)
