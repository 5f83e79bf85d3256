"""Loads prefix blocks from stores and other engines, and sends cached blocks to engines that fetch them.

PrefixSources knows which sources have which blocks. PrefixLoads knows which request loads which blocks, and which
transfers send cached blocks to other engines. RemoteKV has the requests' queues.

For a model with recurrent states a prefix is of use only together with the state after it. So a request fetches what is
missing here of a prefix, up to a snapshot at the other engine, and behind it the snapshot, into its slot. The other
engine sends all of that, or nothing. If less arrives, the request starts over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from actors.core.blocks.block_pool import KVCacheBlock
from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.load_room import LoadRoom
from actors.core.loads.loading_requests import LoadingRequests
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from kv_transfer.connector.fetches import PrefixFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.prefix.prefix_sources import PrefixSources

_MAX_ANSWERED: Final = 0.25
"""Largest part of all blocks that may be pinned because other engines fetch them."""
_MAX_ANSWERED_WITH_STATE: Final = 0.5
"""The same for models with recurrent states, where a part is of no use: of two equal requests one may leave."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of a part of a request's prefix.

    local:            the blocks before it, which this engine has
    num_blocks:       how many blocks of tokens it may bring
    num_state_blocks: how many blocks of a snapshot follow them, without which they are of no use
    """

    local: Sequence[KVCacheBlock]
    num_blocks: int
    num_state_blocks: int = 0


class PrefixLoads:
    """One engine's loads of prefixes, and the transfers that answer other engines' fetches. Idle without sources."""

    def __init__(
        self,
        sources: PrefixSources | None,
        kv_cache_manager: KVCacheManager,
        *,
        loading: LoadingRequests,
        room: LoadRoom,
        timeout_s: float,
    ) -> None:
        """timeout_s: how long a load may take."""
        self._sources = sources
        self._kv = kv_cache_manager
        self._loading = loading
        self._room = room
        self._timeout_s = timeout_s
        self._loads: dict[str, _Load] = {}
        """The load of each request that loads a prefix."""
        self.answers: set[TransferKey] = set()
        """The cached blocks that are being sent to other engines, by transfer."""
        self._steps: deque[tuple[int, float]] = deque()
        self._last_step_s = 0.0

    @property
    def has_orders(self) -> bool:
        """Whether the next step has to begin, cancel or answer a load."""
        return self._sources is not None and self._sources.has_orders

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def num_blocks_after(self, request_id: str) -> int | None:
        """Return how many blocks of its prefix a request has after its load if all come; None: it loads none."""
        load = self._loads.get(request_id)
        return None if load is None else len(load.local) + load.num_blocks

    # -- loads of this engine's requests -------------------------------------------------------------------------

    def try_start(
        self, request: Request, hit: Sequence[KVCacheBlock], queues: Queues, num_headroom_blocks: int, now_s: float
    ) -> bool:
        """Reserve blocks for a request, and load the blocks of its prefix that follow `hit`, which this engine has.

        Returns False, with nothing changed, if no source has such blocks, or too few blocks are free for the request.
        """
        # The sources reserve their blocks first: allocating blocks here might make a store evict them.
        load = self._reserve_with_state(request, hit) if self._kv.states else self._reserve(request, hit)
        if load is None:
            request.prefix_source = None
            return False
        assert self._sources is not None, "only sources reserve blocks"
        num_local_tokens = len(load.local) * self._kv.block_size
        if not self._room.is_left_by(request, queues) or not self._allocate(request, load, num_headroom_blocks):
            self._sources.end(request.request_id, 0)
            return False
        block_ids = self._kv.get_block_ids(request.request_id)[len(load.local) :][: load.num_blocks]
        if load.num_state_blocks:
            block_ids += self._kv.states.get_block_ids(request.request_id)
        self._sources.start(request.request_id, block_ids)
        self._loads[request.request_id] = load
        # Another engine is asked only once for each request.
        request.prefix_source = None
        self._loading.begin(request, 0 if load.num_state_blocks else num_local_tokens, self._timeout_s, now_s)
        return True

    def _allocate(self, request: Request, load: _Load, num_headroom_blocks: int) -> bool:
        blocks = self._kv.allocate_slots(
            request,
            self._room.num_slots_to_go_on(request) - len(load.local) * self._kv.block_size,
            load.local,
            num_headroom_blocks=num_headroom_blocks,
            is_state_loaded=bool(load.num_state_blocks),
        )
        return blocks is not None

    def _reserve(self, request: Request, hit: Sequence[KVCacheBlock]) -> _Load | None:
        """Reserve, at the sources, the blocks of a request after its hit. Returns None if no source has any."""
        if self._sources is None or not request.reads_prefix_cache:
            return None
        # At least one token has to be computed here, since its logits are needed.
        wanted = request.block_hashes[len(hit) : (request.num_tokens - 1) // self._kv.block_size]
        num_blocks = self._sources.reserve(request.request_id, wanted, request.prefix_source, len(hit))
        return _Load(hit, num_blocks) if num_blocks else None

    def _reserve_with_state(self, request: Request, hit: Sequence[KVCacheBlock]) -> _Load | None:
        """Reserve, at another engine, the blocks of a request up to the state that this engine is said to have.

        hit: the blocks here up to a snapshot here; None is returned if it goes as far
        """
        source, block_size = request.prefix_source, self._kv.block_size
        if self._sources is None or source is None or self._kv.snapshots is None or not request.reads_prefix_cache:
            return None
        end = min(source.num_tokens, request.num_tokens - 1) // block_size
        if end <= len(hit):
            return None
        # Blocks of tokens are of use here without their own state: the state after the last one comes.
        local = self._kv.block_pool.find_longest_prefix(request.block_hashes, end)
        state_names = self._kv.snapshots.names_after(request.block_hashes[end - 1])
        wanted = [*request.block_hashes[len(local) : end], *state_names]
        num_spared_tokens = (end - len(hit)) * block_size
        if not self._sources.reserve_whole(request.request_id, wanted, source, num_spared_tokens):
            return None
        return _Load(local, end - len(local), len(state_names))

    def cancel(self, request_id: str) -> None:
        """Cancel a load. finish() is still called for it later."""
        assert self._sources is not None, "only sources start loads"
        self._sources.cancel(request_id)

    def finish(self, request_id: str, loaded: LoadedBlocks, queues: Queues, now_s: float, *, is_fetched: bool) -> bool:
        """Let a request whose load is over go on after the blocks that were loaded.

        is_fetched: another engine had them, not a store
        Returns False if no such load was under way, or if the request has ended meanwhile.
        """
        load = self._loads.pop(request_id, None)
        if load is None:
            return False
        assert self._sources is not None, "they have started it"
        self._sources.end(request_id, loaded.num_blocks)
        is_useless = load.num_state_blocks > 0 and loaded.num_blocks < load.num_blocks + load.num_state_blocks
        num_blocks = 0 if is_useless else min(loaded.num_blocks, load.num_blocks)
        self._kv.count_loaded(num_blocks, is_fetched=is_fetched)
        request = self._loading.pop(request_id)
        if request is None:
            return False
        if is_useless:
            self._loading.start_over(request, queues, now_s)
            return True
        num_tokens = (len(load.local) + num_blocks) * self._kv.block_size
        if not request.is_known_to_worker:
            request.num_cached_tokens = num_tokens
        self._loading.go_on(request, num_tokens, queues, now_s)
        return True

    # -- fetches of other engines --------------------------------------------------------------------------------

    def answer(self, want: WantedFetch, fetch: PrefixFetch, num_spare_blocks: int) -> None:
        """Send another engine the cached blocks of a prefix, within the limits for answers.

        num_spare_blocks: free blocks to keep for the running requests, so that no answer leads to a preemption
        """
        key = want.answer_key
        if self._sources is None or key in self.answers:
            return  # Without links, the fetch ends at its deadline. With a known key, the peer sent the fetch twice.
        max_part = _MAX_ANSWERED_WITH_STATE if self._kv.states else _MAX_ANSWERED
        max_num_blocks = int(self._kv.block_pool.num_blocks * max_part) - self.num_answered_blocks()
        blocks = self._kv.block_pool.find_longest_prefix(fetch.block_hashes, max(0, max_num_blocks))
        blocks = _cut(blocks, self._kv.block_pool.num_free_blocks - num_spare_blocks)
        if self._kv.states and len(blocks) < len(fetch.block_hashes):
            blocks = []
        self._sources.answer(want, [block.block_id for block in blocks])
        self._kv.pins.pin_cached(key, blocks)
        self.answers.add(key)

    def on_sent(self, key: TransferKey) -> bool:
        """Free the blocks of an answer, which no link reads any more. Returns whether the answer was under way."""
        if key not in self.answers:
            return False
        self.answers.remove(key)
        self._kv.pins.unpin(key)
        return True

    def num_answered_blocks(self) -> int:
        """Return how many blocks answers hold; preemption cannot free them. A block of two answers may count twice."""
        return sum(self._kv.pins.num_pinned_by(key) for key in self.answers)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, metadata: KVConnectorMetadata, num_tokens: int, now_s: float) -> KVConnectorMetadata:
        """Add to a step's metadata what the sources ask of the worker side. num_tokens: of the step."""
        if self._sources is None:
            return metadata
        self._steps.append((num_tokens, now_s))
        return self._sources.add_to(metadata)

    def end_step(self, now_s: float) -> None:
        """Note that the oldest step is over; from its duration the sources learn what computing tokens costs."""
        if self._sources is None or not self._steps:
            return
        num_tokens, begun_s = self._steps.popleft()
        if num_tokens:
            self._sources.observe_steps(num_tokens, (now_s - max(begun_s, self._last_step_s),))
        self._last_step_s = now_s

    def note_steps(self, num_tokens: int, begun_s: float, ends_s: Sequence[float]) -> None:
        """Note steps that followed one another, as begin_step() and end_step() would have.

        num_tokens: of each of the steps; begun_s: the begin of the first one; ends_s: of each step, at least one
        """
        if self._sources is not None:
            seconds = [end_s - begin_s for begin_s, end_s in pairwise((max(begun_s, self._last_step_s), *ends_s))]
            self._sources.observe_steps(num_tokens, seconds)
            self._last_step_s = ends_s[-1]


def _cut(blocks: list[KVCacheBlock], max_num_free: int) -> list[KVCacheBlock]:
    """Return the longest prefix of blocks in which at most max_num_free blocks are held by no request."""
    num_free = 0
    for index, block in enumerate(blocks):
        num_free += block.ref_cnt == 0
        if num_free > max(0, max_num_free):
            return blocks[:index]
    return blocks
