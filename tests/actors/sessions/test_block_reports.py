from __future__ import annotations

from actors.core.blocks.kv_events import KVEventBatch
from actors.sessions.block_messages import MAX_MESSAGE_BLOCKS, CachedBlocks
from actors.sessions.block_reports import BlockReports
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver


def test_a_snapshot_comes_in_parts_after_the_events_so_far() -> None:
    driver = Driver(make_scheduler(num_blocks=MAX_MESSAGE_BLOCKS + 10))
    sent: list[KVEventBatch | CachedBlocks] = []
    reports = BlockReports.of(driver.scheduler, sent.append)
    assert reports is not None
    driver.scheduler.add_request(make_request("a", range(1, 11), max_tokens=1, ignore_eos=True))
    driver.run()
    next_begin = reports.send_part(0, sent.append)
    assert next_begin == MAX_MESSAGE_BLOCKS
    assert reports.send_part(next_begin, sent.append) is None
    batch, first, last = sent
    assert isinstance(batch, KVEventBatch)
    assert isinstance(first, CachedBlocks)
    assert isinstance(last, CachedBlocks)
    assert (batch.sequence, len(batch.events)) == (0, 1)
    assert (first.sequence, first.begin, first.end, first.num_ids) == (
        1,
        0,
        MAX_MESSAGE_BLOCKS,
        MAX_MESSAGE_BLOCKS + 10,
    )
    assert (last.sequence, last.begin, last.end) == (1, MAX_MESSAGE_BLOCKS, MAX_MESSAGE_BLOCKS + 10)
    assert len(first.keys) + len(last.keys) == 2 * 8


def test_many_events_are_due_early() -> None:
    driver = Driver(make_scheduler())
    sent: list[KVEventBatch] = []
    reports = BlockReports.of(driver.scheduler, sent.append)
    assert reports is not None
    are_due = []
    for num_blocks in (4000, 1000):
        reports.log.store([bytes(16)] * num_blocks, 0)
        are_due.append(reports.is_due)
    assert are_due == [False, True]
    reports.report()
    assert reports.log.num_blocks == 0
    reports.report()
    assert len(sent) == 1, "without events nothing is delivered"


def test_an_engine_without_events_reports_nothing() -> None:
    assert BlockReports.of(make_scheduler(enable_kv_events=False), print) is None
