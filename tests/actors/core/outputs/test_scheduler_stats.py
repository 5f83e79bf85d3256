"""Tests of actors/core/outputs/scheduler_stats.py."""

from __future__ import annotations

from pathlib import Path

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_stats import WAIT_REASONS
from actors.core.requests.request import RequestStatus
from actors.core.requests.request_status import render_transitions
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver


def test_stats_count_requests_blocks_tokens_and_steps() -> None:
    driver = Driver(make_scheduler(num_blocks=8, max_num_seqs=1))
    driver.scheduler.add_request(make_request("a", 6, max_tokens=3, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", 6))
    driver.step()
    driver.step()
    stats = driver.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_waiting_for_remote_kvs) == (1, 1, 0)
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (8, 6, 0.25)
    assert (stats.num_prompt_tokens_computed, stats.num_output_tokens, stats.num_steps) == (6, 2, 2)


def test_waiting_requests_are_counted_by_what_they_wait_for() -> None:
    driver = Driver(make_scheduler(num_blocks=8, max_num_seqs=1))
    for name in ("a", "b"):
        driver.scheduler.add_request(make_request(name, 6, max_tokens=3, ignore_eos=True))
    driver.step()
    stats = driver.scheduler.make_stats()
    assert stats.num_waiting_reqs == 1
    assert stats.num_waiting_by_reason == dict.fromkeys(WAIT_REASONS, 0), "it waits for its turn"


def test_prefix_hits_are_counted_once_per_admission() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.scheduler.add_request(make_request("a", range(1, 10), max_tokens=3, ignore_eos=True))
    driver.scheduler.add_request(make_request("b", range(1, 10), max_tokens=1))
    driver.run()
    prefix = driver.scheduler.make_stats().prefix_cache_stats
    assert (prefix.requests, prefix.queries, prefix.hits) == (2, 18, 8)


def test_a_cache_reset_is_marked_in_one_snapshot() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a"))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert driver.scheduler.reset_prefix_cache()
    assert [driver.scheduler.make_stats().prefix_cache_stats.reset for _ in range(2)] == [True, False]


def test_a_request_with_nans_is_counted_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=9, ignore_eos=True))
    for _ in range(2):
        output = ModelRunnerOutput(["a"], [[5]], num_nans_in_logits={"a": 3, "gone": 1})
        scheduler.update_from_output(scheduler.schedule(), output)
    assert scheduler.make_stats().num_corrupted_reqs == 1


def test_a_snapshot_does_not_change_afterwards() -> None:
    driver = Driver(make_scheduler())
    before = driver.scheduler.make_stats()
    driver.scheduler.add_request(make_request("a", max_tokens=1))
    driver.run()
    assert (before.num_output_tokens, before.prefix_cache_stats.requests) == (0, 0)


def test_the_document_shows_the_transitions_of_the_code() -> None:
    document = Path(__file__).parents[4] / "docs" / "states.md"
    assert render_transitions() in document.read_text(encoding="utf-8")
