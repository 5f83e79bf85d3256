from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import pytest

from actors.config import SchedulerConfig
from actors.core.blocks.block_pool import BlockPool
from actors.core.outputs.load_report import LoadMeter
from actors.core.outputs.scheduler_stats import LoadReport, PrefixCacheStats
from actors.core.requests.running_rows import RunningRows
from actors.core.requests.sampling_params import PoolingParams
from actors.core.scheduler import Scheduler
from kv_transfer.link_load import LinkLoad
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import TransferStats
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeWorker


@dataclass
class FakeTransfers:
    loading: Container[str] = ()
    transfer_stats: TransferStats | None = None


def make_meter() -> LoadMeter:
    return LoadMeter(SchedulerConfig(), BlockPool(10), BLOCK_SIZE, 4096)


def work_of(scheduler: Scheduler) -> LoadReport:
    """The load without what the engine's settings and blocks make of it."""
    load = load_of(scheduler)
    return LoadReport(
        load.number,
        load.num_waiting_tokens,
        load.num_prefill_tokens,
        load.num_decodes,
        load.num_decode_context_tokens,
        num_coming_decodes=load.num_coming_decodes,
        num_coming_context_tokens=load.num_coming_context_tokens,
    )


def _work(
    number: int,
    num_waiting_tokens: int,
    num_prefill_tokens: int = 0,
    num_decodes: int = 0,
    num_context: int = 0,
    *,
    coming: tuple[int, int],
) -> LoadReport:
    """coming: decodes to come, and their tokens"""
    return LoadReport(
        number,
        num_waiting_tokens,
        num_prefill_tokens,
        num_decodes,
        num_context,
        num_coming_decodes=coming[0],
        num_coming_context_tokens=coming[1],
    )


def load_of(scheduler: Scheduler) -> LoadReport:
    load = scheduler.make_stats().load_report
    assert load is not None
    return load


def step(scheduler: Scheduler, worker: FakeWorker) -> None:
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.execute(output))


def test_waiting_prompts_chunks_and_decodes_are_counted_apart() -> None:
    scheduler, worker = make_scheduler(max_num_batched_tokens=16, max_num_seqs=2), FakeWorker(64, 4)
    for name, length in (("a", 8), ("b", 20), ("c", 12)):
        scheduler.add_request(make_request(name, length, max_tokens=20))
    assert work_of(scheduler) == _work(1, 40, coming=(3, 40))
    step(scheduler, worker)  # 8 tokens of a and 8 of b; there are two rows
    assert work_of(scheduler) == _work(2, 12, 12, 1, 8, coming=(2, 32))
    step(scheduler, worker)
    assert work_of(scheduler) == _work(3, 12, 0, 2, 9 + 20, coming=(1, 12))


def test_an_idle_engine_has_no_load() -> None:
    scheduler, worker = make_scheduler(), FakeWorker(64, 4)
    scheduler.add_request(make_request("a", max_tokens=2))
    for _ in range(3):
        step(scheduler, worker)
    assert work_of(scheduler) == LoadReport(1)


@pytest.mark.parametrize(("num_state_blocks", "num_left"), [(3, 50), (0, 83)], ids=["cache and stores", "stores"])
def test_what_was_lately_found_and_cannot_be_looked_up_is_taken_off_from_waiting_prompts(
    num_state_blocks: int, num_left: int
) -> None:
    # Of 10 000 tokens 4000 were in the cache, and 1000 of the other 6000 in stores.
    meter = LoadMeter(SchedulerConfig(), BlockPool(10), BLOCK_SIZE, 4096, num_state_blocks)
    requests, rows = {"a": make_request("a", 100)}, RunningRows(4, 4)
    assert meter.report(requests, FakeTransfers(), rows, PrefixCacheStats()).num_waiting_tokens == 100
    half = PrefixCacheStats(requests=1000, queries=10_000, hits=4000, loaded=1000)
    assert meter.report(requests, FakeTransfers(), rows, half).num_waiting_tokens == num_left
    assert meter.report(requests, FakeTransfers(), rows, half).num_waiting_tokens == num_left
    none = PrefixCacheStats(requests=2000, queries=20_000, hits=4000, loaded=1000)
    assert meter.report(requests, FakeTransfers(), rows, none).num_waiting_tokens == 100


def test_prefixes_that_waiting_prompts_share_with_those_before_them_count_once() -> None:
    scheduler, worker = make_scheduler(max_num_batched_tokens=4 * BLOCK_SIZE, num_blocks=100), FakeWorker(100, 4)
    prefix = range(6 * BLOCK_SIZE)
    for number in range(3):
        own = range(1000 * (number + 1), 1000 * (number + 1) + 2 * BLOCK_SIZE)
        scheduler.add_request(make_request(f"r{number}", [*prefix, *own], max_tokens=2))
    assert load_of(scheduler).num_waiting_tokens == (6 + 3 * 2) * BLOCK_SIZE
    step(scheduler, worker)
    report = load_of(scheduler)
    assert (report.num_prefill_tokens, report.num_waiting_tokens) == (4 * BLOCK_SIZE, 2 * 2 * BLOCK_SIZE)


@pytest.mark.parametrize("loading", [{"a"}, set()])
def test_requests_whose_kv_comes_from_elsewhere_do_not_count(loading: set[str]) -> None:
    transfers, rows = FakeTransfers(loading), RunningRows(4, 4)
    report = make_meter().report({"a": make_request("a", 10)}, transfers, rows, PrefixCacheStats())
    assert report.num_waiting_tokens == (0 if loading else 10)
    assert (report.num_coming_decodes, report.num_coming_context_tokens) == (1, 10), "it will decode here in any case"


def test_a_prefix_that_comes_from_elsewhere_for_another_request_counts_as_cached() -> None:
    prefix = range(3 * BLOCK_SIZE)
    requests = {name: make_request(name, [*prefix, 100 + number]) for number, name in enumerate("ab")}
    report = make_meter().report(requests, FakeTransfers({"a"}), RunningRows(4, 4), PrefixCacheStats())
    assert report.num_waiting_tokens == 1


def test_what_is_computed_for_another_engine_or_for_a_vector_will_not_decode_here() -> None:
    requests = {
        "producer": make_request("producer", 10, role=TransferRole.PRODUCER),
        "vector": make_request("vector", 10, pooling_params=PoolingParams()),
        "preempted": make_request("preempted", 10, output_token_ids=[1, 2]),
    }
    report = make_meter().report(requests, FakeTransfers(), RunningRows(4, 4), PrefixCacheStats())
    assert report.num_waiting_tokens == 10 + 10 + 12
    assert (report.num_coming_decodes, report.num_coming_context_tokens) == (1, 12)


def test_of_those_that_run_producers_and_vectors_will_not_decode_here() -> None:
    rows = RunningRows(4, 4)
    requests = {name: make_request(name, 10, role=role) for name, role in (("a", TransferRole.PRODUCER), ("b", None))}
    requests["c"] = make_request("c", 10, pooling_params=PoolingParams())
    for request in requests.values():
        rows.add(request, 12, runs_ahead=False)
    report = make_meter().report(requests, FakeTransfers(), rows, PrefixCacheStats())
    assert (report.num_prefill_tokens, report.num_coming_decodes, report.num_coming_context_tokens) == (30, 1, 10)


def test_a_report_tells_what_the_engine_has_room_for() -> None:
    scheduler, worker = make_scheduler(max_num_batched_tokens=16, max_num_seqs=2, num_blocks=20), FakeWorker(64, 4)
    scheduler.add_request(make_request("a", 2 * BLOCK_SIZE + 1, max_tokens=20))
    room = LoadReport(
        number=1,
        num_waiting_tokens=2 * BLOCK_SIZE + 1,
        num_free_blocks=20,
        num_blocks=20,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        num_coming_decodes=1,
        num_coming_context_tokens=2 * BLOCK_SIZE + 1,
    )
    assert load_of(scheduler) == room
    step(scheduler, worker)
    assert load_of(scheduler).num_free_blocks == 17


def test_a_report_tells_how_many_requests_wait_for_slots_of_how_many_blocks() -> None:
    scheduler, worker = make_scheduler(num_blocks=12, num_state_blocks=3), FakeWorker(64, 4)
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 9, max_tokens=20))
    assert (load_of(scheduler).num_state_blocks, load_of(scheduler).num_waiting_slots) == (3, 3)
    step(scheduler, worker)
    assert load_of(scheduler).num_waiting_slots == 1
    scheduler = make_scheduler(num_blocks=12)
    scheduler.add_request(make_request("a"))
    assert (load_of(scheduler).num_state_blocks, load_of(scheduler).num_waiting_slots) == (0, 0)


def test_a_report_tells_how_much_a_transfer_moves_for_a_token() -> None:
    report = make_meter().report({}, FakeTransfers(), RunningRows(4, 4), PrefixCacheStats())
    assert report.kv_bytes_per_token == 4096


def test_a_report_has_the_links_on_which_the_engine_sends() -> None:
    links = (LinkLoad("decode-0", 10), LinkLoad("decode-1", 20, 5e6, 0.001))
    transfers = FakeTransfers(transfer_stats=TransferStats(link_loads=links))
    report = make_meter().report({}, transfers, RunningRows(4, 4), PrefixCacheStats())
    assert report.links == (links[1], links[0])


@pytest.mark.parametrize("itl_s", [0.1, None], ids=["with an aim", "without an aim"])
def test_the_mean_gap_so_far_is_that_of_all_who_decode(itl_s: float | None) -> None:
    clock = Clock()
    driver = Driver(make_scheduler(clock=clock))
    driver.scheduler.chunk_budget.set_aims(itl_s)

    def gaps() -> tuple[int, float]:
        load = load_of(driver.scheduler)
        return load.num_decode_gaps, load.decode_gap_s

    driver.scheduler.add_request(make_request("slow", 8, max_tokens=100, ignore_eos=True))
    assert gaps() == (0, 0.0)
    driver.step()
    for step_s in (0.04, 0.02, 0.02):
        driver.step()
        clock.now_s += step_s
    # The first request has three gaps of 27 ms; the second one has had none yet, and then has six of 10 ms.
    assert gaps() == ((3, pytest.approx(0.08 / 3)) if itl_s else (0, 0.0))
    driver.scheduler.add_request(make_request("quick", 8, max_tokens=100, ignore_eos=True))
    driver.step()
    clock.now_s += 0.02
    for _ in range(6):
        driver.step()
        clock.now_s += 0.01
    # Ten gaps in 160 ms, and six in 60 ms.
    assert gaps() == ((16, pytest.approx((0.16 + 0.06) / 16)) if itl_s else (0, 0.0))


@pytest.mark.parametrize("ttft_s", [0.5, None], ids=["with an aim", "without an aim"])
def test_who_waits_for_longer_than_the_aim_is_late(ttft_s: float | None) -> None:
    clock = Clock()
    driver = Driver(make_scheduler(max_num_batched_tokens=16, max_num_seqs=2, clock=clock))
    driver.scheduler.chunk_budget.set_aims(0.1, ttft_s)

    def num_late() -> int:
        return load_of(driver.scheduler).num_coming_late

    arrived_s = clock.now_s
    for name in ("computed in parts", "waits"):
        driver.scheduler.add_request(make_request(name, 40, max_tokens=20, arrival_time_s=arrived_s))
    driver.scheduler.add_request(make_request("vector", 40, pooling_params=PoolingParams(), arrival_time_s=arrived_s))
    driver.step()
    clock.now_s += 0.4
    assert num_late() == 0
    driver.scheduler.add_request(make_request("new", 40, max_tokens=20, arrival_time_s=clock.now_s))
    clock.now_s += 0.2
    assert num_late() == (2 if ttft_s else 0)
    clock.now_s += 0.4
    assert num_late() == (3 if ttft_s else 0)
    for _ in range(6):
        driver.step()
    assert num_late() == (1 if ttft_s else 0), "who has a token waits for it no more"
