"""Keeps the prefix indexes of one ingress, one for each version of the model that it serves."""

from __future__ import annotations

from collections.abc import Callable

from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from cluster.routing.prefixes.engine_blocks import BlockReportCounts, EngineBlocks
from cluster.routing.prefixes.prefix_index import DEFAULT_BYTES, PrefixIndex, PrefixIndexSize


class PrefixIndexes:
    """The indexes that routers read, and that sessions correct by what engines report."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES, make_index: Callable[[int], PrefixIndex] = PrefixIndex) -> None:
        """Have no index yet. max_bytes: the limit on the memory of each index; make_index: makes one of such a size"""
        self._max_bytes = max_bytes
        self._make_index = make_index
        self._indexes: dict[int, tuple[PrefixIndex, int]] = {}
        """The index of each version, and the block size that it counts in."""
        self._counts: dict[int, BlockReportCounts] = {}

    def make(self, version: int, block_size: int) -> PrefixIndex:
        """Return the index of a version; a new one if there is none, or if the block size is another."""
        index, known_size = self._indexes.get(version, (None, 0))
        if index is None or known_size != block_size:
            index = self._make_index(self._max_bytes)
            self._indexes[version] = index, block_size
            self._counts[version] = BlockReportCounts()
        return index

    def follow(self, engine: EngineDescriptor) -> EngineBlocks | None:
        """Return what takes an engine's reports on a new session; None if no router knows the engine's version."""
        if engine.model_version not in self._indexes:
            return None
        index, block_size = self._indexes[engine.model_version]
        return EngineBlocks(engine.key, index, block_size, self._counts[engine.model_version])

    def forget_engine(self, engine: EngineKey) -> None:
        """Forget what an engine has that left the cluster."""
        for index, _ in self._indexes.values():
            index.forget_engine(engine)

    def keep(self, versions: set[int]) -> None:
        """Forget the indexes of all other versions."""
        for version in self._indexes.keys() - versions:
            del self._indexes[version], self._counts[version]

    def sizes(self) -> dict[int, tuple[PrefixIndexSize, BlockReportCounts]]:
        """Return the size of each version's index, and what engines have reported to it."""
        return {version: (index.size, self._counts[version]) for version, (index, _) in self._indexes.items()}

    def hits(self, version: int) -> tuple[int, int]:
        """Return how many prompts were looked up in a version's index, and of how many an engine had a prefix."""
        index, _ = self._indexes[version]
        return index.num_lookups, index.num_hits
