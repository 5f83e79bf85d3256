"""A consumer that has no blocks to give: its own requests wait, and nobody else's do."""

from __future__ import annotations

import asyncio

from cluster.engine_connection import EngineRole
from tests.faults.engine_process import EngineProcess
from tests.faults.live_engines import IMPATIENT, LiveEngines

NUM_BLOCKS = 64
NUM_LONG_TOKENS = 416
"""A request whose prompt has nearly all of the blocks leaves no room for a load."""
LONG_SEED = 1000


async def start_long_request(engines: LiveEngines, decode: EngineProcess) -> str:
    """Returns its id when it runs."""
    question = engines.ask(num_prompt_tokens=NUM_LONG_TOKENS, num_tokens=94, seed=LONG_SEED)
    stream = engines.session(decode).submit(question.request)
    await anext(stream)
    return question.request.request_id


async def test_others_are_served_while_a_consumer_has_no_room(engines: LiveEngines) -> None:
    prefill = await engines.start("prefill-0", EngineRole.PREFILL)
    full = await engines.start("decode-0", EngineRole.DECODE, num_blocks=NUM_BLOCKS)
    free = await engines.start("decode-1", EngineRole.DECODE)
    long_request_id = await start_long_request(engines, full)
    waiting = asyncio.create_task(engines.check_pair(engines.ask(), prefill, full))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(engines.check_pair(engines.ask(), prefill, free))
    assert not waiting.done()
    assert engines.session(full).num_unfinished_requests == 2, "the long request should be running still"
    assert free.count("num_prompt_tokens_computed") == 0
    engines.session(full).abort(long_request_id)
    await waiting
    await engines.check_whole(prefill, full, free)
    assert full.count("num_prompt_tokens_computed") == NUM_LONG_TOKENS, "of the long request, and no other"


async def test_a_producer_that_gave_up_waiting_for_room_is_not_waited_for(engines: LiveEngines) -> None:
    transfer = IMPATIENT.model_copy(update={"ready_timeout_s": 0.05})
    prefill = await engines.start("prefill-0", EngineRole.PREFILL, transfer=transfer)
    full = await engines.start("decode-0", EngineRole.DECODE, num_blocks=NUM_BLOCKS)
    long_request_id = await start_long_request(engines, full)
    question = engines.ask()
    producer, consumer = engines.submit_pair(question, prefill, full)
    outputs = [output async for output in producer]
    assert [output.error for output in outputs] == ["handoff failed: the consumer did not reserve blocks in time"]
    engines.session(full).abort(long_request_id)
    await engines.check_stream(question, consumer)
    await engines.check_whole(prefill, full)
