"""Keeps the blocks that each request holds.

A request's blocks stand in the order of its tokens: token i is in slot i % block_size of block i // block_size. A
failed allocation changes nothing. A block is named in the prefix cache only when a step, or a transfer, that filled it
is over: see cache_blocks.

A model with recurrent layers keeps a slot for each request as well (state_slots.py), for which all this holds too. Its
prefix hits end where a snapshot of the state was taken (state_snapshots.py).

A step that is still under way may write the blocks of a request that has ended meanwhile. Nothing else may use these
blocks before the step is over, a link least of all, since the device does not order a link's writes after the step's.
Until then the blocks are fenced: no request holds them, and they are not free.

Requests share full blocks only. The cached tokens of a prompt after its last full block are copied (prompt_tails.py):
the step that admits a request makes the copy before it computes. The step holds the source block until the step is
over, even if the request ends before.

block_pool.py decides which cached block is evicted when a new block is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actors.config import CacheConfig
from actors.core.blocks.block_pool import BlockPool, CacheEvents, CacheObserver, KVCacheBlock, count_common_blocks
from actors.core.blocks.fenced_blocks import FencedBlocks
from actors.core.blocks.kv_events import KVEventLog
from actors.core.blocks.prompt_tails import PartialHit, PromptTails
from actors.core.blocks.snapshot_events import SnapshotEvents
from actors.core.blocks.state_slots import StateSlots
from actors.core.blocks.state_snapshots import StateSnapshots
from actors.core.blocks.transfer_pins import PinnedBlocks
from actors.core.outputs.scheduler_output import BlockCopy
from actors.core.outputs.scheduler_stats import PrefixCacheStats
from actors.core.requests.request import Request
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole


class KVCacheManager:
    """The blocks of each request, by its id, on top of one block pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        events: KVEventLog | None = None,
        observer: CacheObserver | None = None,
        *,
        num_state_blocks: int = 0,
    ) -> None:
        """num_state_blocks: blocks of a request's slot

        With slots, the observer hears of no cached blocks: no store has the states that go with them. The events are
        those of snapshots.
        """
        self._snapshot_events: SnapshotEvents | None = None
        pool_events: CacheEvents | None = events
        if num_state_blocks:
            pool_events = self._snapshot_events = None if events is None else SnapshotEvents(events)
            observer = None
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, pool_events, observer)
        self._observer = observer
        self.prefix_cache_stats = PrefixCacheStats()
        self.states = StateSlots(num_state_blocks)
        self._enable_caching = enable_caching
        self._copies_tails = enable_caching and not self.states
        self.snapshots: StateSnapshots | None = None
        """None for a model without states, and without a prefix cache."""
        if enable_caching and self.states:
            self.snapshots = StateSnapshots(self.block_pool, num_state_blocks, block_size)
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached_blocks: dict[str, int] = {}
        self.pins = PinnedBlocks(self.block_pool)
        self._fenced = FencedBlocks(self.block_pool)
        self._tails = PromptTails()
        self._copies: list[BlockCopy] = []
        self._copied: list[KVCacheBlock] = []

    @classmethod
    def configured(
        cls,
        config: CacheConfig,
        num_blocks: int,
        num_state_blocks: int,
        events: KVEventLog | None,
        observer: CacheObserver | None,
    ) -> KVCacheManager:
        """Make a manager with an engine's settings."""
        return cls(
            num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            events,
            observer,
            num_state_blocks=num_state_blocks,
        )

    @property
    def usage(self) -> float:
        """The held part of the pool, 0 to 1."""
        return 1.0 - self.block_pool.num_free_blocks / self.block_pool.num_blocks

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that become free when the steps under way are over; shared ones may be counted twice."""
        return len(self._fenced)

    def begin_step(self, step_index: int) -> list[BlockCopy]:
        """Note that a step begins, and return the blocks that the step copies first. step_index: 1, 2, 3 …"""
        self._fenced.begin_step(step_index, self._copied)
        copies, self._copies, self._copied = self._copies, [], []
        return copies

    def end_step(self, step_index: int) -> None:
        """Note that a step, and every step before it, is over: the blocks fenced for these steps are freed."""
        self._fenced.end_step(step_index)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks num_tokens tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def num_blocks_with_slot(self, num_tokens: int) -> int:
        """How many blocks a request of num_tokens tokens takes in all, those of its slot included."""
        return self.num_blocks_for(num_tokens) + self.states.num_blocks

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks the request holds for its tokens."""
        return len(self._blocks.get(request_id, ()))

    def num_held_by(self, request_id: str) -> int:
        """How many blocks the request holds in all, those of its slot included."""
        return self.num_blocks_of(request_id) + len(self.states.get_block_ids(request_id))

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Return the cached blocks of the request's longest known prefix, without taking hold of them.

        At least one token is left to compute, since its logits are needed. A consumer may have its whole prompt cached:
        its producer sends the first output token. With recurrent states a consumer has no hit, since a load that fails
        leaves it without a state, and others' hits end at a snapshot.
        """
        if not self._enable_caching or not request.reads_prefix_cache:
            return []
        is_consumer = request.transfer_role is TransferRole.CONSUMER
        if is_consumer and self.states:
            return []
        request.extend_block_hashes()
        num_tokens = request.num_tokens - (not is_consumer)
        blocks = self.block_pool.find_longest_prefix(request.block_hashes, num_tokens // self.block_size)
        return blocks if self.snapshots is None else self.snapshots.cut_hit(blocks)

    def find_partial_block(self, request: Request, hit: Sequence[KVCacheBlock]) -> PartialHit | None:
        """Return a block that has more of a request's prompt than its hit, without taking hold of it.

        The block has either the prompt's tail, or the last full block, whose last token has to be computed. Only a held
        block is returned, since holding it costs no free block. Neither end of a handoff gets one: a link may move the
        blocks before this step makes the copy. With recurrent states nobody gets one: the state there is not known.
        """
        if not self._copies_tails or request.transfer_role is not None or not request.reads_prefix_cache:
            return None
        begin = len(hit) * self.block_size
        block, num_tokens = None, request.num_tokens - 1
        if begin + self.block_size == request.num_tokens:
            block = self.block_pool.find_held(request.block_hashes[len(hit)])
        if block is None and begin <= request.num_prompt_tokens < begin + self.block_size:
            block = self._find_tail(request)
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        return PartialHit(block, num_tokens - begin) if block is not None and num_tokens > begin else None

    def _find_tail(self, request: Request) -> KVCacheBlock | None:
        name = request.prompt_tail_name()
        return None if name is None else self._tails.find(name)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = (),
        *,
        partial_hit: PartialHit | None = None,
        num_slots_that_must_fit: int = 0,
        num_headroom_blocks: int = 0,
        is_state_loaded: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Give the request slots for num_new_tokens after its computed tokens and its prefix hit.

        A request without blocks gets its slot for recurrent states as well, if there are such slots. With a hit, the
        slot has the state after the hit once the next step has made its copies.

        new_computed_blocks: the request's prefix hit, if the request holds no blocks yet
        partial_hit: a cached block with the tokens after the prefix hit, which the next step copies
        num_slots_that_must_fit: total number of slots that must be available, even if fewer are given now
        num_headroom_blocks: number of blocks that must stay free
        is_state_loaded: the state after the hit comes from elsewhere, so that none is copied
        Returns the new blocks beyond the hit, or None if too few blocks are free: then nothing has changed.
        """
        blocks = self._blocks.get(request.request_id, ())
        num_held = len(blocks) + len(new_computed_blocks)
        num_slots = request.num_computed_tokens + len(new_computed_blocks) * self.block_size + num_new_tokens
        if partial_hit is not None:
            num_slots += partial_hit.num_tokens
        num_new_blocks = self.num_blocks_for(num_slots) - num_held
        if num_new_blocks <= 0 and not new_computed_blocks:
            return []
        num_new_blocks = max(num_new_blocks, 0)
        num_wanted = max(num_new_blocks, self.num_blocks_for(num_slots_that_must_fit) - num_held)
        # A block of the hit that is free leaves the free queue too, so it counts against the free blocks.
        num_wanted += sum(block.ref_cnt == 0 for block in new_computed_blocks) + num_headroom_blocks
        num_state_blocks = self.states.num_missing(request.request_id)
        num_wanted += num_state_blocks
        num_left = self.block_pool.num_free_blocks - num_wanted
        if num_left < 0:
            return None
        # The hit is taken first, so that get_free_blocks() cannot return blocks of the hit.
        self.block_pool.touch(new_computed_blocks)
        snapshot: list[KVCacheBlock] = []
        if self.snapshots is not None and not is_state_loaded:
            snapshot = self.snapshots.hold(new_computed_blocks)
        new_blocks = self.block_pool.get_free_blocks(num_new_blocks)
        if num_state_blocks:
            self.states.put(request.request_id, self._make_slot(snapshot, num_left))
        held = self._blocks.setdefault(request.request_id, [])
        held += new_computed_blocks
        held += new_blocks
        if new_computed_blocks:
            self._num_cached_blocks[request.request_id] = len(new_computed_blocks)
        if partial_hit is not None:
            self.block_pool.touch([partial_hit.block])
            self._copy([partial_hit.block], new_blocks[:1], held=[partial_hit.block])
        return new_blocks

    def _make_slot(self, snapshot: list[KVCacheBlock], num_left: int) -> list[KVCacheBlock]:
        """Return a slot: with the state of a snapshot that is held, or empty. num_left: see StateSnapshots.give_away"""
        if self.snapshots is not None and self.snapshots.give_away(snapshot, num_left):
            return snapshot
        slot = self.block_pool.get_free_blocks(self.states.num_blocks)
        if snapshot:
            self._copy(snapshot, slot, held=snapshot)
        return slot

    def _copy(
        self, sources: Sequence[KVCacheBlock], destinations: Sequence[KVCacheBlock], held: Sequence[KVCacheBlock]
    ) -> None:
        """Let the next step copy blocks before it computes. held: blocks that the step holds until it is over"""
        pairs = zip(sources, destinations, strict=True)
        self._copies += [BlockCopy(source.block_id, destination.block_id) for source, destination in pairs]
        self._copied += held

    def take_snapshot(self, request: Request, num_spare_blocks: int) -> None:
        """Let the next step copy a running request's state before it computes, if a snapshot is due there.

        num_spare_blocks: how many blocks have to stay free
        """
        if self.snapshots is not None and (blocks := self.snapshots.take(request, num_spare_blocks)):
            self._copy(self.states.get_blocks(request.request_id), blocks, held=blocks)

    def leave_prefix(self, request: Request) -> int:
        """Return how many tokens a running request leaves to the prefix cache that is about to lose its blocks.

        Its slot becomes a snapshot if it has the state after the request's last full block.
        """
        if self.snapshots is None:
            return 0 if self.states else request.num_computed_tokens
        num_final_blocks = self._num_cached_blocks.get(request.request_id, 0)
        # Otherwise the state is that of another token, or a step under way still changes it.
        if num_final_blocks and request.num_computed_tokens == num_final_blocks * self.block_size:
            slot = self.states.get_blocks(request.request_id)
            self.snapshots.leave(slot, request.block_hashes[num_final_blocks - 1], num_final_blocks - 1)
        return len(self.get_computed_blocks(request)) * self.block_size

    def grow(self, request_id: str) -> int:
        """Give a running request one more block and return its id. Raises IntegrityError if none is free."""
        [block] = self.block_pool.get_free_blocks(1)
        self._blocks[request_id].append(block)
        return block.block_id

    def cache_blocks(self, request: Request, num_final_tokens: int) -> None:
        """Name the request's full blocks in the prefix cache.

        num_final_tokens: number of tokens, from the first one, whose KV is in place and will not change
        """
        if not self._enable_caching:
            return
        request_id = request.request_id
        request.extend_block_hashes()
        hashes = request.block_hashes
        first = self._num_cached_blocks.get(request_id, 0)
        last = min(num_final_tokens // self.block_size, len(hashes))
        if last <= first:
            return
        self.block_pool.cache_full_blocks(self._blocks[request_id][first:last], hashes[first:last], first)
        self._num_cached_blocks[request_id] = last
        if self._observer is not None:
            block_ids = [block.block_id for block in self._blocks[request_id][first:last]]
            self._observer.on_blocks_cached(hashes[first:last], block_ids)

    def offer_prompt_tail(self, request: Request) -> None:
        """Let others copy the end of a request's prompt, now that all of it is computed."""
        if self._copies_tails and (name := request.prompt_tail_name()) is not None:
            block = self._blocks[request.request_id][request.num_prompt_tokens // self.block_size]
            self._tails.add(request.request_id, name, block)

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count a look-up whose request was admitted."""
        if self._enable_caching:
            self.prefix_cache_stats.requests += 1
            self.prefix_cache_stats.queries += request.num_tokens
            self.prefix_cache_stats.hits += num_hit_tokens

    def count_loaded(self, num_blocks: int, *, is_fetched: bool) -> None:
        """Count the blocks that a load of a prefix has brought. is_fetched: another engine had them, not a store"""
        self.prefix_cache_stats.loaded += num_blocks * self.block_size
        self.prefix_cache_stats.fetched += num_blocks * self.block_size * is_fetched

    def free(self, request: Request) -> None:
        """Free all blocks of a request, if it holds any; they stay fenced while steps are under way."""
        self._num_cached_blocks.pop(request.request_id, None)
        self._tails.remove(request.request_id)
        blocks = self._blocks.pop(request.request_id, [])
        blocks += self.states.pop(request.request_id)
        if self.snapshots is not None:
            self.snapshots.forget_request(request.request_id)
        if blocks:
            self._fenced.free(blocks)

    def reported_blocks(self, begin: int, end: int) -> list[KVCacheBlock]:
        """Return, of the blocks with the ids begin to end - 1, those of which the events say that they are cached."""
        blocks = self.block_pool.cached_blocks(begin, end)
        return blocks if self._snapshot_events is None else self._snapshot_events.reported(blocks)

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return the ids of the request's blocks, in the order of its tokens; empty if it holds none."""
        return [block.block_id for block in self._blocks.get(request_id, ())]

    def get_handoff_ids(self, request: Request) -> list[int]:
        """Return the ids of the blocks that travel in a request's handoff, in order: its tokens', then its slot's."""
        block_ids = self.get_block_ids(request.request_id)[: self.num_blocks_for(request.num_tokens)]
        return block_ids + self.states.get_block_ids(request.request_id)

    def get_group_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of the request's blocks as the worker gets them: its tokens', and its slot's if it has one."""
        block_ids = self.get_block_ids(request_id)
        return (block_ids, self.states.get_block_ids(request_id)) if self.states else (block_ids,)

    def get_num_common_prefix_blocks(self, requests: Iterable[Request]) -> int:
        """How many blocks, from the first one, all these requests share; 0 for a single request."""
        return count_common_blocks([self._blocks[request.request_id] for request in requests])

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. Refuses, and returns False, while a request holds any."""
        if any(self._blocks.values()) or self.pins.holders():
            return False
        self.block_pool.reset()
        if self._observer is not None:
            self._observer.clear()
        self.prefix_cache_stats.reset = True
        return True

    def holders(self) -> set[str]:
        """The ids of the requests that hold blocks."""
        return {request_id for request_id, blocks in self._blocks.items() if blocks}

    def check_integrity(self) -> None:
        """Raise IntegrityError if the pool or the requests' blocks contradict each other."""
        self.block_pool.check_integrity()
        num_holds: Counter[int] = Counter()
        self.states.check_integrity(self.holders())
        for holder, blocks in (*self._blocks.items(), *self.pins, *self.states):
            block_ids = [block.block_id for block in blocks]
            if len(set(block_ids)) != len(blocks):
                raise IntegrityError(f"{holder} holds a block twice: {block_ids}")
            num_holds.update(block_ids)
        pool = self.block_pool.blocks
        for block_id, count in num_holds.items():
            if count > 1 and pool[block_id].block_hash is None:
                raise IntegrityError(f"block {block_id} has no hash and is shared")
        num_holds.update(block.block_id for block in self._fenced)
        ref_cnts = {block.block_id: block.ref_cnt for block in pool if block.ref_cnt}
        if ref_cnts != num_holds:
            wrong = next(block for block in pool if block.ref_cnt != num_holds[block.block_id])
            raise IntegrityError(
                f"block {wrong.block_id} has ref_cnt {wrong.ref_cnt}, {num_holds[wrong.block_id]} requests hold it"
            )
        if self._copies:
            raise IntegrityError(f"no step has begun that makes the copies {self._copies}")
        if not self._tails.owners() <= self._blocks.keys():
            raise IntegrityError("a request that holds nothing has the tail of its prompt copied")
