"""Names for full blocks of tokens: equal prefixes have equal names, in every process.

A block's hash covers its parent's hash, its own tokens and what else its KV depends on (ExtraKeys), so it stands for
the whole prefix. The chain starts from a hash of cache_salt: requests of different salts share nothing. xxh3_128 has no
secret and is not collision-resistant against an attacker who chooses tokens; the salt is what separates tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, calcsize, pack
from typing import TypeAlias

from xxhash import xxh3_128_digest

from actors.core.multimodal import MultiModalFeature

BlockHash: TypeAlias = bytes
"""16 bytes."""

_ROOT = b"raypd/block-hash/1"


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What a prompt's KV depends on besides its tokens.

    cache_salt: keeps apart those who must not see each other's hits
    lora_name:  the adapter, by a name that no other weights have (Adapter.key)
    mm_features: what stands in the place of placeholder tokens
    prompt_embeds_digest: names the embeddings that stand in the place of all tokens
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
    """Hashes the full blocks of one block size."""

    __slots__ = ("_cut", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._cut = Struct(f"{block_size * calcsize('i')}s").iter_unpack

    def extend(self, block_hashes: list[BlockHash], token_ids: Sequence[int], keys: ExtraKeys) -> None:
        """Append the hashes of the blocks that token_ids fills beyond those that block_hashes already names.

        block_hashes: of token_ids' first blocks, all of them made by this method with the same keys
        token_ids:    the request's tokens from its first one on, each in [0, 2^31)
        """
        first = len(block_hashes)
        last = len(token_ids) // self.block_size
        if first >= last:
            return
        new_token_ids = token_ids[first * self.block_size : last * self.block_size]
        # pack() reads the list three times as fast as array() does, iter_unpack() cuts without slices.
        blocks = self._cut(pack(f"{len(new_token_ids)}i", *new_token_ids))
        parent = block_hashes[-1] if block_hashes else root_hash(keys.cache_salt)
        digest, append = xxh3_128_digest, block_hashes.append
        if keys.is_plain:
            for (tokens,) in blocks:
                parent = digest(parent + tokens)
                append(parent)
            return
        for block, (tokens,) in enumerate(blocks, first):
            parent = digest(parent + tokens + self._extra(block, keys))
            append(parent)

    def name_tail(
        self, block_hashes: Sequence[BlockHash], token_ids: Sequence[int], keys: ExtraKeys
    ) -> BlockHash | None:
        """Return the name of what token_ids has after its last full block; None if it has nothing there.

        block_hashes: of token_ids' full blocks at least
        """
        num_full = len(token_ids) // self.block_size
        tail = token_ids[num_full * self.block_size :]
        if not tail:
            return None
        parent = block_hashes[num_full - 1] if num_full else root_hash(keys.cache_salt)
        tokens = pack(f"{len(tail) + 1}i", len(tail), *tail)
        return xxh3_128_digest(parent + tokens + self._extra(num_full, keys))

    def _extra(self, block: int, keys: ExtraKeys) -> bytes:
        """Encode a block's own keys: each with its kind and its length, so that no two lists of keys look alike."""
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


def root_hash(cache_salt: str | None) -> BlockHash:
    """Return the parent of block 0. No salt and an empty one are different."""
    return xxh3_128_digest(_ROOT if cache_salt is None else _ROOT + b"\0" + cache_salt.encode())
