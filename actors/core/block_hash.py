"""Names for full blocks of tokens: equal prefixes have equal names, in every process.

A block's hash covers its parent's hash, its own tokens and what else its KV depends on, so it stands for the whole
prefix. The chain starts from a hash of cache_salt: requests of different salts share nothing. xxh3_128 has no secret
and is not collision-resistant against an attacker who chooses tokens; the salt is what separates tenants.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from xxhash import xxh3_128_digest

BlockHash: TypeAlias = bytes
"""16 bytes."""

_TOKEN_TYPECODE = "i"
_ROOT = b"raypd/block-hash/1"


class BlockHasher:
    """Hashes the full blocks of one block size."""

    __slots__ = ("_num_block_bytes", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_block_bytes = block_size * array(_TOKEN_TYPECODE).itemsize

    def extend(self, block_hashes: list[BlockHash], token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Append the hashes of the blocks that token_ids fills beyond those that block_hashes already names.

        block_hashes: of token_ids' first blocks, all of them made by this method
        token_ids:    the request's tokens from its first one on, each in [0, 2^31)
        """
        first = len(block_hashes)
        last = len(token_ids) // self.block_size
        if first >= last:
            return
        size = self._num_block_bytes
        data = array(_TOKEN_TYPECODE, token_ids[first * self.block_size : last * self.block_size]).tobytes()
        parent = block_hashes[-1] if block_hashes else root_hash(cache_salt)
        for start in range(0, len(data), size):
            parent = xxh3_128_digest(parent + data[start : start + size])
            block_hashes.append(parent)


def root_hash(cache_salt: str | None) -> BlockHash:
    """Return the parent of block 0. No salt and an empty one are different."""
    return xxh3_128_digest(_ROOT if cache_salt is None else _ROOT + b"\0" + cache_salt.encode())
