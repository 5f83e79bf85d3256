"""Connections that break between engines that live: the transfer fails into recovery, and the next one works."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from cluster.errors import EngineFailed
from cluster.routing.engine_connection import EngineRole
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, NUM_PROMPT_TOKENS, TRANSFER, LiveEngines

NUM_CHUNK_TOKENS = NUM_PROMPT_TOKENS // NUM_CHUNKS
CLOSED_TIMEOUT_S = 60.0
POINTS = [
    pytest.param(Point.BEFORE_CHUNK, 1, id="before the first chunk"),
    pytest.param(Point.AFTER_CHUNK, 2, id="between chunks"),
    pytest.param(Point.INSIDE_CHUNK, 3, id="inside a chunk"),
]


@pytest.mark.parametrize(("point", "chunk"), POINTS)
@pytest.mark.parametrize("action", [Action.CUT_DATA, Action.CUT_CONTROL])
async def test_a_cut_link_is_rebuilt_and_what_had_arrived_is_kept(
    engines: LiveEngines, action: Action, point: Point, chunk: int
) -> None:
    prefill, decode = await engines.start_pair()
    decode.arm(Fault(action, point, chunk, peer=prefill.address))
    await engines.check_pair(engines.ask(), prefill, decode)
    await decode.wait_fired()
    await engines.check_whole(prefill, decode)
    assert decode.count("num_links_lost") == 1
    num_kept_tokens = NUM_PROMPT_TOKENS - decode.count("num_prompt_tokens_computed")
    num_chunks_before = chunk if point is Point.AFTER_CHUNK else chunk - 1
    if action is Action.CUT_DATA:
        assert num_kept_tokens == num_chunks_before * NUM_CHUNK_TOKENS
    else:
        # It is heard of a moment later: what moves meanwhile may still come through.
        assert num_chunks_before * NUM_CHUNK_TOKENS <= num_kept_tokens < NUM_PROMPT_TOKENS
    await engines.check_handed_over(prefill, decode)


@pytest.mark.parametrize("point", [Point.BEFORE_CHUNK, Point.INSIDE_CHUNK, Point.AFTER_CHUNK])
async def test_a_producer_whose_data_link_breaks_recovers_too(engines: LiveEngines, point: Point) -> None:
    prefill, decode = await engines.start_pair()
    prefill.arm(Fault(Action.CUT_DATA, point, 3))
    await engines.check_pair(engines.ask(), prefill, decode)
    await prefill.wait_fired()
    await engines.check_whole(prefill, decode)
    await engines.check_handed_over(prefill, decode)


async def test_one_of_two_links_of_a_producer_breaks_and_the_other_goes_on(engines: LiveEngines) -> None:
    prefill, broken = await engines.start_pair()
    sound = await engines.start("decode-1", EngineRole.DECODE)
    await engines.check_handed_over(prefill, sound)
    broken.arm(Fault(Action.CUT_DATA, Point.INSIDE_CHUNK, 3))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engines.check_pair(engines.ask(), prefill, broken))
        for _ in range(3):
            tasks.create_task(engines.check_pair(engines.ask(), prefill, sound))
    await broken.wait_fired()
    await engines.check_whole(prefill, broken, sound)
    counted = {
        name: sound.count(name) for name in ("num_links_lost", "num_transfers_failed", "num_prompt_tokens_computed")
    }
    assert set(counted.values()) == {0}, counted
    await engines.check_handed_over(prefill, broken)


async def test_blocks_of_a_lost_link_stay_pinned_until_its_thread_is_through(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair()
    question = engines.ask()
    decode.arm(Fault(Action.HOLD, Point.INSIDE_CHUNK, 3))
    streams = engines.submit_pair(question, prefill, decode)
    await decode.wait_fired()
    prefill.signal(signal.SIGKILL)
    await decode.wait_for(num_links_lost=1)
    engines.session(decode).abort(question.request.request_id)
    num_blocks = NUM_PROMPT_TOKENS // 8 + 1
    await decode.wait_for(num_held_reqs=1, num_free_blocks=decode.count("num_blocks") - num_blocks)
    decode.call("release")
    await engines.check_stream(question, streams[1])
    await engines.check_whole(decode)


@pytest.mark.parametrize("action", [Action.CUT_DATA, Action.CUT_CONTROL])
async def test_with_policy_fail_a_cut_link_fails_the_request_with_the_reason(
    engines: LiveEngines, action: Action
) -> None:
    transfer = TRANSFER.model_copy(update={"load_failure_policy": "fail"})
    prefill, decode = await engines.start_pair(transfer=transfer)
    decode.arm(Fault(action, Point.INSIDE_CHUNK, 3, peer=prefill.address))
    with pytest.raises(EngineFailed, match="handoff failed: link with prefill-0 lost"):
        await engines.check_pair(engines.ask(), prefill, decode)
    await engines.check_whole(prefill, decode)
    assert decode.count("num_prompt_tokens_computed") == 0
    await engines.check_handed_over(prefill, decode)


@pytest.mark.parametrize("action", [Action.CUT_DATA, Action.CUT_CONTROL])
async def test_links_that_broke_leave_no_file_and_no_thread_behind(engines: LiveEngines, action: Action) -> None:
    prefill, decode = await engines.start_pair()

    def footprints() -> list[dict[str, int]]:
        return [process.call("footprint") for process in (prefill, decode)]

    async def break_links(num_times: int) -> list[dict[str, int]]:
        for _ in range(num_times):
            decode.arm(Fault(action, Point.INSIDE_CHUNK, 2, peer=prefill.address))
            await engines.check_pair(engines.ask(), prefill, decode)
            await decode.wait_fired()
            await engines.check_handed_over(prefill, decode)
        return footprints()

    def has_grown(before: list[dict[str, int]], after: list[dict[str, int]]) -> bool:
        """A few may be closing still; what stays behind each time would be eight of them."""
        return any(large[name] >= small[name] + 5 for small, large in zip(before, after, strict=True) for name in small)

    before = await break_links(2)
    after = await break_links(8)
    deadline_s = time.monotonic() + CLOSED_TIMEOUT_S
    while has_grown(before, after):
        assert time.monotonic() < deadline_s, (before, after)
        await asyncio.sleep(0.1)
        after = footprints()
