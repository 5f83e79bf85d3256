from __future__ import annotations

import pytest

from actors.core.requests.block_hash import ExtraKeys
from cluster.simulation.engines.counted_tokens import (
    TOKEN,
    CountedTokens,
    PromptIdentity,
    WorkloadHasher,
    check_block_size,
)

PLAIN = ExtraKeys()


def tokens(num_tokens: int, hashes: tuple[int, ...] = (), number: int = 1) -> CountedTokens:
    return CountedTokens(num_tokens, PromptIdentity(number, num_tokens, hashes))


def test_counted_tokens_are_as_long_as_the_list_that_they_stand_for() -> None:
    counted = tokens(5)
    all_tokens = counted + [TOKEN] * 2
    all_tokens.append(TOKEN)
    all_tokens.extend([TOKEN, TOKEN])
    all_tokens.grow(3)

    assert (len(counted), len(all_tokens), list(all_tokens)) == (5, 13, [TOKEN] * 13)
    assert all_tokens[-1] == all_tokens[12] == TOKEN
    assert all_tokens[5:8] == [TOKEN] * 3
    assert not tokens(0)
    with pytest.raises(IndexError):
        counted[5]


def test_the_first_tokens_keep_their_identity() -> None:
    first = tokens(1100, (7, 8, 9))[:1050]

    assert isinstance(first, CountedTokens)
    assert _hashes(first) == _hashes(tokens(1100, (7, 8, 9)))


def test_blocks_of_the_prompt_have_the_hashes_of_the_workload() -> None:
    one, same, other = tokens(1100, (7, 8, 9)), tokens(1100, (7, 8, 9), number=2), tokens(1100, (7, 5, 9), number=3)

    assert _hashes(one) == _hashes(same)
    assert _hashes(one)[0] == _hashes(other)[0]
    assert _hashes(one)[1] != _hashes(other)[1]


def test_blocks_that_reach_beyond_the_prompt_belong_to_one_request() -> None:
    one = tokens(1100, (7, 8, 9)) + [TOKEN] * 500
    same = tokens(1100, (7, 8, 9), number=2) + [TOKEN] * 500

    assert len(_hashes(one)) == 3
    assert _hashes(one)[:2] == _hashes(same)[:2]
    assert _hashes(one)[2] != _hashes(same)[2]


def test_prompts_without_hashes_share_nothing() -> None:
    assert not set(_hashes(tokens(2048, number=1))) & set(_hashes(tokens(2048, number=2)))


def test_hashes_go_on_where_they_ended() -> None:
    counted = tokens(512)
    hashes = _hashes(counted)
    longer = counted + [TOKEN] * 512

    WorkloadHasher(512).extend(hashes, longer, PLAIN)

    assert hashes == _hashes(longer)


def test_equal_ends_of_prompts_have_one_name() -> None:
    hasher = WorkloadHasher(512)

    def name(counted: CountedTokens) -> bytes | None:
        return hasher.name_tail(_hashes(counted), counted, PLAIN)

    assert name(tokens(600, (7, 8))) == name(tokens(600, (7, 8), number=2)) is not None
    assert name(tokens(601, (7, 8))) != name(tokens(600, (7, 8)))
    assert name(tokens(600)) is None
    assert name(tokens(512, (7,))) is None


def test_hashes_need_blocks_of_their_size() -> None:
    check_block_size(512, has_hashes=True)
    check_block_size(16, has_hashes=False)
    with pytest.raises(ValueError, match="set the engines' block_size to 512"):
        check_block_size(16, has_hashes=True)


def _hashes(counted: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    WorkloadHasher(512).extend(hashes, counted, PLAIN)
    return hashes
