from __future__ import annotations

import pytest

from actors.core.block_hash import BlockHash, BlockHasher, root_hash


def hashes(token_ids: list[int], salt: str | None = None, block_size: int = 4) -> list[BlockHash]:
    found: list[BlockHash] = []
    BlockHasher(block_size).extend(found, token_ids, salt)
    return found


def test_a_hash_is_the_same_in_every_process_and_version() -> None:
    assert [value.hex() for value in hashes(list(range(8)))] == [
        "1656bc5cc83603be53bf023e8e8ed038",
        "7d1de5e0c50012a32e54fa6089a6ecc4",
    ]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_a_hash_stands_for_the_whole_prefix() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    other_first, other_second = hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert first != other_first
    assert second != other_second
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == first


def test_extending_gives_what_hashing_at_once_gives() -> None:
    token_ids = list(range(20))
    found: list[BlockHash] = []
    for num_tokens in (3, 4, 11, 12, 20):
        BlockHasher(4).extend(found, token_ids[:num_tokens], "salt")
    assert found == hashes(token_ids, "salt")


@pytest.mark.parametrize(("one", "other"), [(None, ""), ("a", "b"), (None, "a")])
def test_salts_separate_every_block(one: str | None, other: str | None) -> None:
    assert root_hash(one) != root_hash(other)
    token_ids = list(range(8))
    assert not set(hashes(token_ids, one)) & set(hashes(token_ids, other))


def test_equal_salts_share() -> None:
    assert hashes([1, 2, 3, 4], "a") == hashes([1, 2, 3, 4], "a")
