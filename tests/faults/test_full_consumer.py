"""A consumer that has no blocks to give: its own requests wait, and nobody else's do."""

from __future__ import annotations

import asyncio

from cluster.routing.engine_connection import EngineRole
from tests.faults.engine_process import EngineProcess
from tests.faults.live_engines import TRANSFER, LiveEngines

NUM_BLOCKS = 64
NUM_LONG_TOKENS = 416
"""A request whose prompt has nearly all of the blocks leaves no room for a load."""
NUM_LONG_REQUESTS = 40
"""One runs after the other, for as long as a slow machine may take for what goes on beside them."""
LONG_SEED = 1000
CHUNK = 16


async def fill(engines: LiveEngines, decode: EngineProcess) -> list[str]:
    """Have long requests run and wait in an engine. Returns their ids when the first of them runs."""
    requests = [
        engines.ask(num_prompt_tokens=NUM_LONG_TOKENS, num_tokens=94, seed=LONG_SEED).request
        for _ in range(NUM_LONG_REQUESTS)
    ]
    streams = [engines.session(decode).submit(request) for request in requests]
    await anext(streams[0])
    return [request.request_id for request in requests]


def abort(engines: LiveEngines, decode: EngineProcess, request_ids: list[str]) -> None:
    for request_id in reversed(request_ids):
        engines.session(decode).abort(request_id)


async def test_others_are_served_while_a_consumer_has_no_room(engines: LiveEngines) -> None:
    prefill = await engines.start("prefill-0", EngineRole.PREFILL)
    full = await engines.start("decode-0", EngineRole.DECODE, num_blocks=NUM_BLOCKS)
    free = await engines.start("decode-1", EngineRole.DECODE)
    # One token more than whole chunks: whether the consumer computes this prompt shows in what it has computed in all.
    question = engines.ask(num_prompt_tokens=6 * CHUNK + 1)
    others = [engines.ask() for _ in range(3)]
    long_request_ids = await fill(engines, full)
    waiting = asyncio.create_task(engines.check_pair(question, prefill, full))
    async with asyncio.TaskGroup() as tasks:
        for other in others:
            tasks.create_task(engines.check_pair(other, prefill, free))
    assert not waiting.done()
    assert engines.session(full).num_unfinished_requests >= 2, "a long request should be running still"
    assert free.count("num_prompt_tokens_computed") == 0
    abort(engines, full, long_request_ids)
    await waiting
    await engines.check_whole(prefill, full, free)
    assert full.count("num_prompt_tokens_computed") % CHUNK == 0, "of long requests, and no other"


async def test_a_producer_that_gave_up_waiting_for_room_is_not_waited_for(engines: LiveEngines) -> None:
    transfer = TRANSFER.model_copy(update={"ready_timeout_s": 0.05})
    prefill = await engines.start("prefill-0", EngineRole.PREFILL, transfer=transfer)
    full = await engines.start("decode-0", EngineRole.DECODE, num_blocks=NUM_BLOCKS)
    question = engines.ask()
    long_request_ids = await fill(engines, full)
    producer, consumer = engines.submit_pair(question, prefill, full)
    outputs = [output async for output in producer]
    assert [output.error for output in outputs] == ["handoff failed: the consumer did not reserve blocks in time"]
    abort(engines, full, long_request_ids)
    await engines.check_stream(question, consumer)
    await engines.check_whole(prefill, full)
