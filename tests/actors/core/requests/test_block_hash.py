from __future__ import annotations

from hashlib import blake2b
from struct import pack

import hypothesis.strategies as st
import pytest
from hypothesis import given

from actors.core.requests.block_hash import PUBLIC_KEY, BlockHash, BlockHasher, BlockHashKey, ExtraKeys
from actors.core.requests.multimodal import MultiModalFeature


def hashes(token_ids: list[int], salt: str | None = None) -> list[BlockHash]:
    return hashes_with(token_ids, ExtraKeys(salt))


def hashes_with(token_ids: list[int], keys: ExtraKeys, hash_key: BlockHashKey = PUBLIC_KEY) -> list[BlockHash]:
    return hashes_by(BlockHasher(4, hash_key), token_ids, keys)


def hashes_by(hasher: BlockHasher, token_ids: list[int], keys: ExtraKeys) -> list[BlockHash]:
    found: list[BlockHash] = []
    hasher.extend(found, token_ids, keys)
    return found


def test_a_hash_is_the_same_in_every_process_and_version() -> None:
    assert [value.hex() for value in hashes(list(range(8)))] == [
        "c270d6f7cf7ee1368414fdfe39d94035",
        "b67cca4ef0119b1d94da6984921bbcaf",
    ]


def test_a_hash_is_keyed_blake2b_over_its_parent_and_its_tokens() -> None:
    key, token_ids = BlockHashKey(bytes(range(32))), [7, 8, 9, 10]
    root = blake2b(b"raypd/block-hash/2", key=key.value, digest_size=16).digest()
    assert hashes_with(token_ids, ExtraKeys(), key) == [
        blake2b(root + pack("4i", *token_ids), key=key.value, digest_size=16).digest()
    ]


def test_who_has_another_key_has_other_names_for_everything() -> None:
    token_ids, keys = list(range(10)), ExtraKeys("salt", "adapter")
    one, other = BlockHasher(4, BlockHashKey.draw()), BlockHasher(4, BlockHashKey.draw())
    names = [
        {*hashes, hasher.root_hash("salt"), hasher.name_tail(hashes, token_ids, keys), hasher.name_all(token_ids, keys)}
        for hasher in (one, other)
        for hashes in [hashes_by(hasher, token_ids, keys)]
    ]
    assert [len(of_one) for of_one in names] == [5, 5]
    assert not names[0] & names[1]


def test_a_key_is_not_shown_and_has_32_bytes() -> None:
    key = BlockHashKey(b"k" * 32)
    assert "k" * 8 not in f"{key} {key!r}"
    with pytest.raises(ValueError, match="has 32 bytes, not 31"):
        BlockHashKey(b"k" * 31)


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
        BlockHasher(4, PUBLIC_KEY).extend(found, token_ids[:num_tokens], ExtraKeys("salt"))
    assert found == hashes(token_ids, "salt")


@pytest.mark.parametrize(("one", "other"), [(None, ""), ("a", "b"), (None, "a")])
def test_salts_separate_every_block(one: str | None, other: str | None) -> None:
    hasher = BlockHasher(4, PUBLIC_KEY)
    assert hasher.root_hash(one) != hasher.root_hash(other)
    token_ids = list(range(8))
    assert not set(hashes(token_ids, one)) & set(hashes(token_ids, other))


def test_equal_salts_share() -> None:
    assert hashes([1, 2, 3, 4], "a") == hashes([1, 2, 3, 4], "a")


ITEM = MultiModalFeature("cat", 5, 2, 2)


@pytest.mark.parametrize(
    ("keys", "num_equal"),
    [
        (ExtraKeys(), 4),
        (ExtraKeys(lora_name="x"), 0),
        (ExtraKeys(prompt_embeds_digest=b"x"), 0),
        (ExtraKeys(mm_features=(ITEM,)), 1),
        (ExtraKeys(mm_features=(MultiModalFeature("cat", 12, 2, 2),)), 3),
    ],
)
def test_a_key_changes_the_blocks_that_it_concerns_and_all_after_them(keys: ExtraKeys, num_equal: int) -> None:
    token_ids = list(range(16))
    pairs = zip(hashes(token_ids), hashes_with(token_ids, keys), strict=True)
    assert [one == other for one, other in pairs] == [True] * num_equal + [False] * (4 - num_equal)


FEATURES = st.lists(
    st.builds(MultiModalFeature, st.sampled_from(["cat", "dog"]), st.integers(0, 10), st.integers(1, 6), st.just(1)),
    max_size=2,
).map(tuple)
KEYS = st.builds(
    ExtraKeys,
    st.sampled_from([None, "", "s"]),
    st.sampled_from([None, "", "x"]),
    FEATURES,
    st.sampled_from([None, b"", b"d"]),
)
TOKENS = st.lists(st.integers(0, 1), min_size=12, max_size=12)


def seen_by(block: int, token_ids: list[int], keys: ExtraKeys) -> object:
    """All that the KV of a block depends on beyond the blocks before it."""
    items = [(f.mm_hash, f.offset) for f in keys.mm_features if f.offset < 4 * block + 4 and f.end > 4 * block]
    return token_ids[4 * block : 4 * block + 4], items, keys.cache_salt, keys.lora_name, keys.prompt_embeds_digest


@given(TOKENS, TOKENS, KEYS, KEYS)
def test_blocks_share_a_hash_iff_nothing_before_their_end_differs(
    one_tokens: list[int], other_tokens: list[int], one_keys: ExtraKeys, other_keys: ExtraKeys
) -> None:
    ones, others = hashes_with(one_tokens, one_keys), hashes_with(other_tokens, other_keys)
    is_same = True
    for block, (one, other) in enumerate(zip(ones, others, strict=True)):
        is_same &= seen_by(block, one_tokens, one_keys) == seen_by(block, other_tokens, other_keys)
        assert (one == other) == is_same
