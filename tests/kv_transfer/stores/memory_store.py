"""A store of everything, for tests of those who use stores."""

from __future__ import annotations

from collections.abc import Sequence


class EverythingStore:
    """The scheduler side of a store that saves each block as soon as it is there, and never lets one go."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.is_cleared = False

    def find(self, block_hashes: Sequence[bytes]) -> int:
        return next(
            (i for i, block_hash in enumerate(block_hashes) if block_hash not in self.blocks), len(block_hashes)
        )

    def choose_cached(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        new = [block_hash for block_hash in block_hashes if block_hash not in self.blocks]
        self.blocks.update(new)
        return new

    def choose_evicted(self, block_hash: bytes) -> bool:
        return False

    def take_forgotten(self) -> Sequence[bytes]:
        return ()

    def begin_load(self, block_hashes: Sequence[bytes]) -> None:
        assert self.blocks.issuperset(block_hashes)

    def end_load(self, block_hashes: Sequence[bytes], num_loaded: int) -> None:
        assert num_loaded <= len(block_hashes)

    def clear(self) -> None:
        self.blocks.clear()
        self.is_cleared = True
