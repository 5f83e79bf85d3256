"""Parts of prefixes that come from elsewhere, and those that are lent: the bookkeeping around PrefixSources.

RemoteKV has the requests' places and blocks; here is what was asked for, by whom, and what was promised to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.requests.request import Request
from kv_transfer.connector.reports import KVConnectorOutput, WantedPrefix
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.prefix.prefix_fetch import name_of_loan
from kv_transfer.prefix.prefix_sources import PrefixSources

_MAX_LENT: Final = 0.25
"""Of all blocks: what is lent to others must leave room for this engine's own requests."""


class PrefixLoads:
    """Does nothing without sources."""

    def __init__(self, sources: PrefixSources | None, kv_cache_manager: KVCacheManager) -> None:
        self._sources = sources
        self._kv = kv_cache_manager
        self._num_local_blocks: dict[str, int] = {}
        """Of requests that load a prefix: how much of it was here before."""
        self.lent: set[str] = set()
        """Names under which blocks are lent."""
        self._steps: deque[tuple[int, float]] = deque()
        self._last_step_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_local_blocks

    # -- what is borrowed ----------------------------------------------------------------------------------------

    def reserve(self, request: Request, hit: Sequence[KVCacheBlock]) -> int:
        """How many blocks after its hit can be brought; then start() or give_up() follows."""
        if self._sources is None or not request.reads_prefix_cache:
            return 0
        # One token at least is computed here: its logits are wanted.
        wanted = request.block_hashes[len(hit) : (request.num_tokens - 1) // self._kv.block_size]
        num_blocks = self._sources.reserve(request.request_id, wanted, request.prefix_source, len(hit))
        if not num_blocks:
            request.prefix_source = None
        return num_blocks

    def give_up(self, request: Request) -> None:
        """There is no room to wait for what was reserved."""
        assert self._sources is not None, "they have reserved it"
        self._sources.end(request.request_id, 0)

    def start(self, request: Request, num_local_blocks: int, num_blocks: int) -> None:
        """Bring what was reserved into the request's blocks after its first ones. An engine is asked only once."""
        assert self._sources is not None, "they have reserved it"
        block_ids = self._kv.get_block_ids(request.request_id)
        self._sources.start(request.request_id, block_ids[num_local_blocks : num_local_blocks + num_blocks])
        self._num_local_blocks[request.request_id] = num_local_blocks
        request.prefix_source = None

    def cancel(self, request_id: str) -> None:
        """A load is not wanted any more; its report still comes."""
        assert self._sources is not None, "they have started it"
        self._sources.cancel(request_id)

    def take_over(self, output: KVConnectorOutput) -> Iterable[tuple[str, int | None]]:
        """Each load that is over: its request, and how many tokens from the start are here now.

        None for a load that was not under way.
        """
        if self._sources is None:
            return
        for request_id, loaded in self._sources.take_loads(output).items():
            yield request_id, self._end(request_id, loaded, self._sources)

    def _end(self, request_id: str, loaded: LoadedBlocks, sources: PrefixSources) -> int | None:
        num_local_blocks = self._num_local_blocks.pop(request_id, None)
        if num_local_blocks is None:
            return None
        sources.end(request_id, loaded.num_blocks)
        self._kv.count_loaded(loaded.num_blocks)
        return (num_local_blocks + loaded.num_blocks) * self._kv.block_size

    # -- what is lent --------------------------------------------------------------------------------------------

    def lend(self, wants: Iterable[WantedPrefix], num_spare_blocks: int) -> None:
        """Send other engines what is cached here of prefixes, as far as not too much is lent already.

        num_spare_blocks: free ones that are needed here meanwhile: nobody is to be preempted for a loan
        """
        sources = self._sources
        if sources is None:
            return  # Who asks has a deadline.
        for want in wants:
            max_num_blocks = int(self._kv.block_pool.num_blocks * _MAX_LENT) - self.num_lent_blocks()
            name = name_of_loan(want)
            if name in self.lent:
                continue  # A peer that repeats itself.
            blocks = self._kv.block_pool.find_longest_prefix(want.block_hashes, max(0, max_num_blocks))
            blocks = _cut(blocks, self._kv.block_pool.num_free_blocks - num_spare_blocks)
            sources.lend(want, [block.block_id for block in blocks])
            self._kv.lend(name, blocks)
            self.lent.add(name)

    def take_back(self, name: str) -> bool:
        """Nobody reads these blocks any more; returns whether it is the name of any that are lent."""
        if name not in self.lent:
            return False
        self.lent.remove(name)
        self._kv.take_back(name)
        return True

    def num_lent_blocks(self) -> int:
        """Blocks that a preemption cannot free; shared ones may be counted twice."""
        return sum(self._kv.num_blocks_of(name) for name in self.lent)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, metadata: KVConnectorMetadata, num_tokens: int, now_s: float) -> KVConnectorMetadata:
        """The step's metadata, with what the sources ask of the worker side. It computes so many tokens."""
        if self._sources is None:
            return metadata
        self._steps.append((num_tokens, now_s))
        return self._sources.add_to(metadata)

    def end_step(self, now_s: float) -> None:
        """The oldest step is over. What it took tells whether others are to be asked instead."""
        if self._sources is None or not self._steps:
            return
        num_tokens, begun_s = self._steps.popleft()
        if num_tokens:
            self._sources.observe_step(num_tokens, now_s - max(begun_s, self._last_step_s))
        self._last_step_s = now_s


def _cut(blocks: list[KVCacheBlock], max_num_free: int) -> list[KVCacheBlock]:
    """The first ones, with so many at most among them that nobody holds."""
    num_free = 0
    for index, block in enumerate(blocks):
        num_free += block.ref_cnt == 0
        if num_free > max(0, max_num_free):
            return blocks[:index]
    return blocks
