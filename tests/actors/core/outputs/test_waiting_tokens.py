from __future__ import annotations

import pytest

from actors.core.blocks.block_pool import BlockPool
from actors.core.outputs import waiting_tokens
from actors.core.outputs.waiting_tokens import WaitingTokens
from actors.core.requests.request import Request
from tests.actors.core.builders import BLOCK_SIZE, make_request

PREFIX = list(range(5 * BLOCK_SIZE))


def prompts(num_prompts: int, num_own: int = 3 * BLOCK_SIZE) -> list[Request]:
    """Make requests that share PREFIX and have tokens of their own."""
    return [
        make_request(f"r{number}", [*PREFIX, *range(1000 * (number + 1), 1000 * (number + 1) + num_own)])
        for number in range(num_prompts)
    ]


def counted(pool: BlockPool | None, *requests: Request) -> int:
    waiting = WaitingTokens(pool, BLOCK_SIZE)
    for request in requests:
        waiting.add(request)
    return waiting.num_tokens


def test_a_prefix_that_an_earlier_prompt_has_counts_once() -> None:
    first, second, third = prompts(3)
    assert first.block_hashes, "the requests have hashes to look up"
    assert counted(BlockPool(10), first) == 8 * BLOCK_SIZE
    assert counted(BlockPool(10), first, second, third) == (5 + 3 * 3) * BLOCK_SIZE


def test_what_is_cached_does_not_count_but_for_the_last_token() -> None:
    pool, (first, second) = BlockPool(20), prompts(2)
    blocks = pool.get_free_blocks(8)
    pool.cache_full_blocks(blocks, first.block_hashes)
    assert counted(pool, second) == 3 * BLOCK_SIZE
    assert counted(pool, first) == 1


def test_what_a_running_request_computes_does_not_count_again() -> None:
    first, second = prompts(2)
    waiting = WaitingTokens(BlockPool(10), BLOCK_SIZE)
    waiting.note_coming(first)
    waiting.add(second)
    assert waiting.num_tokens == 3 * BLOCK_SIZE


def test_tokens_that_a_preempted_request_has_kept_are_deducted_once() -> None:
    first, second = prompts(2)
    second.num_computed_tokens = 2 * BLOCK_SIZE
    assert counted(BlockPool(10), first, second) == (8 + 3) * BLOCK_SIZE
    second.num_computed_tokens = 6 * BLOCK_SIZE
    assert counted(BlockPool(10), first, second) == (8 + 2) * BLOCK_SIZE


def test_without_blocks_to_look_up_every_token_counts() -> None:
    assert counted(None, *prompts(3)) == 3 * 8 * BLOCK_SIZE


def test_once_enough_hashes_were_looked_up_others_are_taken_to_share_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_tokens, "_MAX_HASHES", 11)
    # The first two have 8 + 3 hashes, and 11 blocks of 16 to compute; the other 32 blocks have as large a part of them.
    assert counted(BlockPool(10), *prompts(6)) == (11 + 22) * BLOCK_SIZE
    monkeypatch.setattr(waiting_tokens, "_MAX_HASHES", 0)
    assert counted(BlockPool(10), *prompts(2)) == 16 * BLOCK_SIZE


def test_an_empty_queue_has_no_tokens() -> None:
    assert WaitingTokens(BlockPool(10), BLOCK_SIZE).num_tokens == 0
