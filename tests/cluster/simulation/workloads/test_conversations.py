from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench.arrivals import arrival_times
from cluster.simulation.workloads.conversations import ConversationShape, draw_conversations
from cluster.simulation.workloads.drawn_requests import LengthDistribution
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest

SHAPE = ConversationShape(
    system=LengthDistribution(1500, cv=0.5), num_system_prompts=3, messages=LengthDistribution(400, cv=1.0)
)


def drawn(seed: int = 1, num: int = 50, shape: ConversationShape = SHAPE) -> list[WorkloadRequest]:
    return list(draw_conversations(arrival_times(num, 0.5, 1.0, seed), shape, seed))


def by_conversation(requests: list[WorkloadRequest]) -> dict[str, list[WorkloadRequest]]:
    found: defaultdict[str, list[WorkloadRequest]] = defaultdict(list)
    for request in requests:
        found[request.request_id.partition(".")[0]].append(request)
    return found


def test_the_same_seed_draws_the_same_conversations_in_the_order_of_arrival() -> None:
    requests = drawn()
    assert requests == drawn()
    assert requests != drawn(seed=2)
    arrivals_s = [one.arrival_s for one in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert len(by_conversation(requests)) == 50


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_turn_begins_with_the_turn_before_and_its_answer(seed: int) -> None:
    for turns in by_conversation(drawn(seed, 10)).values():
        for before, after in pairwise(turns):
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            num_whole = before.num_prompt_tokens // HASHED_TOKENS
            assert after.block_hashes[:num_whole] == before.block_hashes[:num_whole]
            # what follows differs: a block that was not full, then what came after it
            assert not set(after.block_hashes[num_whole:]) & set(before.block_hashes)
    for one in drawn(seed, 10):
        assert len(one.block_hashes) == math.ceil(one.num_prompt_tokens / HASHED_TOKENS)
        assert len(set(one.block_hashes)) == len(one.block_hashes)


def test_conversations_share_whole_blocks_of_their_system_prompts_and_nothing_else() -> None:
    shape = ConversationShape(system=LengthDistribution(1500), messages=LengthDistribution(600))
    first, second, *_ = by_conversation(drawn(shape=shape)).values()
    assert first[0].block_hashes[:2] == second[0].block_hashes[:2]
    assert not set(first[0].block_hashes[2:]) & set(second[0].block_hashes)


def test_a_conversation_ends_before_its_prompt_is_too_long() -> None:
    shape = ConversationShape(mean_turns=100.0, max_prompt_tokens=4000)
    requests = drawn(shape=shape)
    assert max(one.num_prompt_tokens for one in requests) <= 4000
    assert max(len(turns) for turns in by_conversation(requests).values()) > 3


def test_the_number_of_turns_has_the_mean_asked_for() -> None:
    assert len(drawn(num=2000)) / 2000 == pytest.approx(SHAPE.mean_turns, rel=0.1)


@pytest.mark.parametrize("given", [{"mean_turns": 0.5}, {"mean_pause_s": 0.0}, {"num_system_prompts": 0}])
def test_impossible_shapes_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mean_turns and num_system_prompts"):
        ConversationShape(**given)  # type: ignore[arg-type]  # the point
