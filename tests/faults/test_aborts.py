"""Aborts in every state of a handoff, by the client or on one of the two engines only."""

from __future__ import annotations

import asyncio

import pytest

from cluster.routing.engine_connection import EngineRole
from kv_transfer.params import TransferRole
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, LiveEngines

TIMEOUT_S = 60.0
HOLDS = [
    pytest.param("decode", Point.SAYING_READY, 1, id="before READY"),
    pytest.param("prefill", Point.HEARING_READY, 1, id="while READY is on its way"),
    pytest.param("prefill", Point.BEFORE_CHUNK, 1, id="before the first chunk"),
    pytest.param("prefill", Point.INSIDE_CHUNK, 3, id="while a chunk is sent"),
    pytest.param("decode", Point.INSIDE_CHUNK, 3, id="while a chunk is received"),
    pytest.param("decode", Point.AFTER_CHUNK, NUM_CHUNKS, id="after the last chunk"),
]


@pytest.mark.parametrize("aborted", [("decode", "prefill"), ("decode",), ("prefill",)], ids="+".join)
@pytest.mark.parametrize(("held", "point", "chunk"), HOLDS)
async def test_an_abort_frees_everything_and_spoils_nothing(
    engines: LiveEngines, held: str, point: Point, chunk: int, aborted: tuple[str, ...]
) -> None:
    prefill, decode = await engines.start_pair()
    by_name = {"prefill": prefill, "decode": decode}
    question = engines.ask()
    by_name[held].arm(Fault(Action.HOLD, point, chunk))
    streams = engines.submit_pair(question, prefill, decode)
    await by_name[held].wait_fired()
    for name in aborted:
        engines.session(by_name[name]).abort(question.request.request_id)
    by_name[held].call("release")
    for stream in streams:
        await engines.check_stream(question, stream)
    await engines.check_whole(prefill, decode)
    await engines.check_handed_over(prefill, decode)


async def test_a_request_whose_producer_lets_go_is_answered_by_its_consumer(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair()
    question = engines.ask()
    prefill.arm(Fault(Action.HOLD, Point.INSIDE_CHUNK, 3))
    _, consumer = engines.submit_pair(question, prefill, decode)
    await prefill.wait_fired()
    engines.session(prefill).abort(question.request.request_id)
    prefill.call("release")
    outputs = [output async for output in consumer]
    # From the second token on, if the producer's prefill was over already.
    first_position = outputs[0].first_position
    assert first_position in {0, 1}
    token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    assert token_ids == question.expected[first_position:]
    await engines.check_whole(prefill, decode)


async def test_an_abort_of_a_request_that_no_producer_knows_takes_its_ready_back(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair()
    question = engines.ask()
    stream = engines.submit(question, TransferRole.CONSUMER, decode, prefill.descriptor.kv_address)
    await decode.wait_for(num_waiting_for_remote_kvs=1)
    engines.session(decode).abort(question.request.request_id)
    await engines.check_stream(question, stream)
    await engines.check_whole(prefill, decode)


async def test_an_abort_of_a_request_that_no_consumer_knows_frees_its_producer(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair()
    question = engines.ask()
    stream = engines.submit(question, TransferRole.PRODUCER, prefill, decode.descriptor.kv_address)
    await prefill.wait_for(num_waiting_reqs=1)
    engines.session(prefill).abort(question.request.request_id)
    await engines.check_stream(question, stream)
    await engines.check_whole(prefill, decode)


async def test_an_abort_of_a_loaded_request_that_cannot_run_yet_frees_its_blocks(engines: LiveEngines) -> None:
    prefill = await engines.start("prefill-0", EngineRole.PREFILL)
    decode = await engines.start("decode-0", EngineRole.DECODE, max_num_seqs=1)
    neighbour = engines.ask(num_tokens=200, seed=2000).request
    has_run, num_loads = True, 0
    async with asyncio.timeout(TIMEOUT_S):
        while has_run:  # It has if the load, on a busy machine, took longer than all of the neighbour.
            question, num_loads = engines.ask(), num_loads + 1
            await anext(engines.session(decode).submit(neighbour))
            streams = engines.submit_pair(question, prefill, decode)
            await decode.wait_for(num_transfers_completed=num_loads)
            engines.session(decode).abort(question.request.request_id)
            has_run = [output async for output in streams[1]] != []
            await engines.check_stream(question, streams[0])
            engines.session(decode).abort(neighbour.request_id)
            await engines.check_whole(prefill, decode)


@pytest.mark.parametrize("is_first_aborted", [False, True], ids=["decode", "prefill"])
async def test_an_abort_of_a_running_request_frees_its_blocks(engines: LiveEngines, is_first_aborted: bool) -> None:
    """On the prefill engine while it computes; on the decode engine while it generates."""
    prefill, decode = await engines.start_pair()
    question = engines.ask(num_prompt_tokens=400, num_tokens=100)
    prefill.arm(Fault(Action.HOLD, Point.AFTER_CHUNK, 1))
    streams = engines.submit_pair(question, prefill, decode)
    await prefill.wait_fired()
    prefill.call("release")
    if not is_first_aborted:
        await anext(streams[1])
    engines.session(prefill if is_first_aborted else decode).abort(question.request.request_id)
    for stream in streams:
        await engines.check_stream(question, stream)
    await engines.check_whole(prefill, decode)
    await engines.check_handed_over(prefill, decode)
