"""A bit that flips on the way: found by its checksum, counted, and computed again."""

from __future__ import annotations

import pytest

from cluster.errors import EngineFailed
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_CHUNKS, NUM_PROMPT_TOKENS, TRANSFER, LiveEngines

CHECKED = TRANSFER.model_copy(update={"checksum": True})
NUM_CHUNK_TOKENS = NUM_PROMPT_TOKENS // NUM_CHUNKS


@pytest.mark.parametrize("chunk", [1, 3, NUM_CHUNKS])
async def test_a_flipped_bit_costs_the_chunk_and_those_behind_it(engines: LiveEngines, chunk: int) -> None:
    prefill, decode = await engines.start_pair(transfer=CHECKED)
    decode.arm(Fault(Action.FLIP, Point.AFTER_CHUNK, chunk))
    await engines.check_pair(engines.ask(), prefill, decode)
    await decode.wait_fired()
    await engines.check_whole(prefill, decode)
    assert decode.count("num_corrupt_chunks") == 1
    assert decode.count("num_prompt_tokens_computed") == (NUM_CHUNKS - chunk + 1) * NUM_CHUNK_TOKENS
    await engines.check_handed_over(prefill, decode)


async def test_with_policy_fail_a_flipped_bit_fails_the_request(engines: LiveEngines) -> None:
    transfer = CHECKED.model_copy(update={"load_failure_policy": "fail"})
    prefill, decode = await engines.start_pair(transfer=transfer)
    decode.arm(Fault(Action.FLIP, Point.AFTER_CHUNK, 2))
    with pytest.raises(EngineFailed, match=r"handoff failed: .* chunk 1 was corrupted"):
        await engines.check_pair(engines.ask(), prefill, decode)
    await engines.check_whole(prefill, decode)
    await engines.check_handed_over(prefill, decode)


async def test_nothing_is_wrong_with_a_link_under_load_whose_chunks_are_checked(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair(transfer=CHECKED)
    for _ in range(3):
        await engines.check_handed_over(prefill, decode)
    assert (decode.count("num_corrupt_chunks"), decode.count("num_links_lost")) == (0, 0)
