"""Hashes full blocks of tokens. Equal prefixes have equal hashes in every process, so a hash names a cached block.

A block's hash covers the hash of the block before it (its parent), the block's tokens, and what else its KV depends on
(ExtraKeys); so it stands for the whole prefix. The parent of the first block is a hash of cache_salt, so requests with
different salts share no block.

A hash is BLAKE2b with 16 bytes of output, keyed with a key that only the cluster's engines and ingresses know. So a
client that chooses tokens cannot search for two prompts with the same hash (vLLM: CVE-2025-25183), and nobody without
the key can test which prompt a hash belongs to.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct, calcsize, pack
from typing import Final, TypeAlias

from actors.core.requests.multimodal import MultiModalFeature

BlockHash: TypeAlias = bytes
"""16 bytes."""

HASH_SIZE_BYTES: Final = 16
_KEY_SIZE_BYTES: Final = 32
_ROOT: Final = b"raypd/block-hash/2"


@dataclass(frozen=True, slots=True)
class BlockHashKey:
    """The key of a cluster's block hashes. value: 32 bytes, which no log line shows."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != _KEY_SIZE_BYTES:
            raise ValueError(f"a key of block hashes has {_KEY_SIZE_BYTES} bytes, not {len(self.value)}")

    @classmethod
    def draw(cls) -> BlockHashKey:
        """Make a key that nobody else has."""
        return cls(secrets.token_bytes(_KEY_SIZE_BYTES))


PUBLIC_KEY: Final = BlockHashKey(bytes(_KEY_SIZE_BYTES))
"""A key that everybody knows, for engines outside of a cluster (benchmarks, tests)."""


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Everything except the tokens that a prompt's KV depends on.

    cache_salt: keeps apart clients that must not see each other's hits
    lora_name:  the adapter's key (Adapter.key), which other weights never have
    mm_features: the images that replace placeholder tokens
    prompt_embeds_digest: a digest of the embeddings that replace all tokens
    """

    cache_salt: str | None = None
    lora_name: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()
    prompt_embeds_digest: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether no block needs more than its tokens and its parent."""
        return self.lora_name is None and not self.mm_features and self.prompt_embeds_digest is None


class BlockHasher:
    """Hashes full blocks of one block size with one key. A hasher has no state, so requests share one."""

    __slots__ = ("_begin", "_cut", "_key", "_plain_root", "block_size")

    def __init__(self, block_size: int, key: BlockHashKey) -> None:
        self.block_size = block_size
        self._key = key
        # Copying a keyed hash object costs half as much as making one.
        self._begin = blake2b(digest_size=HASH_SIZE_BYTES, key=key.value)
        self._cut = Struct(f"{block_size * calcsize('i')}s").iter_unpack
        self._plain_root = self._digest(_ROOT)

    def extend(self, block_hashes: list[BlockHash], token_ids: Sequence[int], keys: ExtraKeys) -> None:
        """Append the hashes of the full blocks of token_ids that block_hashes does not have yet.

        block_hashes: the hashes of the first blocks of token_ids, all made by this method with the same keys
        token_ids:    the request's tokens from the first one on, each in [0, 2^31)
        """
        first = len(block_hashes)
        last = len(token_ids) // self.block_size
        if first >= last:
            return
        new_token_ids = token_ids[first * self.block_size : last * self.block_size]
        # pack() is three times as fast as array(), and iter_unpack() makes no slices.
        blocks = self._cut(pack(f"{len(new_token_ids)}i", *new_token_ids))
        parent = block_hashes[-1] if block_hashes else self.root_hash(keys.cache_salt)
        begin, append = self._begin.copy, block_hashes.append
        if keys.is_plain:
            for (tokens,) in blocks:
                digest = begin()
                digest.update(parent + tokens)
                parent = digest.digest()
                append(parent)
            return
        for block, (tokens,) in enumerate(blocks, first):
            parent = self._digest(parent + tokens + self._extra(block, keys))
            append(parent)

    def name_all(self, token_ids: Sequence[int], keys: ExtraKeys) -> BlockHash:
        """Return a hash of all of token_ids as if they were one block, independent of the block size."""
        names: list[BlockHash] = []
        BlockHasher(len(token_ids), self._key).extend(names, token_ids, keys)
        return names[0]

    def name_tail(
        self, block_hashes: Sequence[BlockHash], token_ids: Sequence[int], keys: ExtraKeys
    ) -> BlockHash | None:
        """Return a hash of the tokens after the last full block of token_ids; None if there are none.

        block_hashes: the hashes of all full blocks of token_ids; further ones are ignored
        """
        num_full = len(token_ids) // self.block_size
        tail = token_ids[num_full * self.block_size :]
        if not tail:
            return None
        parent = block_hashes[num_full - 1] if num_full else self.root_hash(keys.cache_salt)
        tokens = pack(f"{len(tail) + 1}i", len(tail), *tail)
        return self._digest(parent + tokens + self._extra(num_full, keys))

    def root_hash(self, cache_salt: str | None) -> BlockHash:
        """Return the hash that block 0 has as its parent. It differs between no salt and an empty salt."""
        return self._plain_root if cache_salt is None else self._digest(_ROOT + b"\0" + cache_salt.encode())

    def _digest(self, content: bytes) -> BlockHash:
        digest = self._begin.copy()
        digest.update(content)
        return digest.digest()

    def _extra(self, block: int, keys: ExtraKeys) -> bytes:
        """Encode a block's extra keys, each with its kind and its length, so that different keys never look alike."""
        begin = block * self.block_size
        parts = [
            (b"m", f"{feature.offset - begin}:{feature.mm_hash}".encode())
            for feature in keys.mm_features
            if feature.offset < begin + self.block_size and feature.end > begin
        ]
        if keys.lora_name is not None:
            parts.append((b"l", keys.lora_name.encode()))
        if keys.prompt_embeds_digest is not None:
            parts.append((b"e", keys.prompt_embeds_digest))
        return b"".join(kind + len(value).to_bytes(4, "little") + value for kind, value in parts)
