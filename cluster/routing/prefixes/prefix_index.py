"""Remembers which prefixes' KV each engine has, as far as an ingress knows.

Blocks come in from two sides. add() notes a guess: a request with these blocks was sent to an engine. store(),
discard() and a snapshot between begin_snapshot() and end_snapshot() note what an engine reports of its cache
(engine_blocks.py). Guesses about an engine that reports are forgotten after guess_timeout_s unless the engine has
reported the blocks; guesses about other engines stay. So for an engine that reports, the index lags by the reports'
period; for the others it is a guess. In both cases an engine that has less than the index says computes the rest. Each
incarnation of an engine is an engine of its own to the index.

Of an engine whose model keeps recurrent states, the index knows the blocks after which a state is kept, as the engine
reports them (actors/core/blocks/snapshot_events.py). Such an engine has a prefix up to the last of these blocks. There
are few of them, so all are kept, and nothing is guessed.

Memory: the index never takes more than max_bytes. It keeps as many blocks as the known engines have together, and a
quarter more, and forgets those that were added least recently. If that many do not fit, it keeps every stride-th block
of a prefix (the blocks stride - 1, 2 * stride - 1, … from 0), where stride is a power of two. An answer is then a
multiple of stride, and up to stride - 1 blocks too small. The stride shrinks again when engines have left and twice as
many blocks as there are would fit. The index then lacks the blocks between, and finds nothing of a prefix until its
engine's next snapshot, which engine_blocks.py asks for at once, or until the prefix is used again.

A block is known by 60 bits of its hash. Two blocks with the same bits are one to the index, which only misplaces a
request. Blocks are in many small dictionaries, so that each operation that must visit all blocks goes on in slices, and
no dictionary takes long to grow.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from actors.core.requests.block_hash import BlockHash
from cluster.routing.engine_connection import EngineKey
from cluster.routing.prefixes.cached_prefix import CachedPrefix
from cluster.routing.prefixes.holder_sets import HolderSet, HolderSets

BlockKeys: TypeAlias = npt.NDArray[np.uint64]
"""Blocks' keys: the first 8 bytes of their hashes, of which the index uses 60 bits."""

DEFAULT_BYTES: Final = 256 << 20
GUESS_TIMEOUT_S: Final = 60.0
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""The most blocks of one engine that count towards the size, so that no engine's claim makes the index coarse."""
_UNKNOWN_NUM_BLOCKS: Final = 200_000
"""How many blocks the index keeps as long as no engine has said how many it has."""
_KEY_BITS: Final = (1 << 60) - 1
_KEY_MASK: Final = np.uint64(_KEY_BITS)
_SHARD_BLOCKS: Final = 2730
"""The most blocks of a shard. CPython gives a dictionary of up to 2^13 / 3 entries 2^13 slots, however it is used."""
_SHARD_BYTES: Final = 147_600 + 32 * _SHARD_BLOCKS
"""The size of a full shard: its dictionary, and an integer of 60 bits for each entry."""
_GUESS_BYTES: Final = 400
"""The size of what is kept of a guess beside 8 bytes for each block."""
_SLICE_BLOCKS: Final = 8192
"""How many blocks one slice of a sweep visits, in about a millisecond."""
_FEW: Final = 8
"""Up to so many keys an array takes longer than a list."""
_MAX_SLOTS: Final = 8192
_MAX_GONE: Final = 1024


@dataclass(frozen=True, slots=True)
class PrefixIndexSize:
    """The size of the index.

    num_blocks: blocks that are known
    size_bytes: the memory that they take
    max_bytes:  its bound
    stride:     every stride-th block of a prefix is kept
    """

    num_blocks: int
    size_bytes: int
    max_bytes: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Guess:
    expires_s: float
    slots: int
    keys: BlockKeys


class PrefixIndex:
    """A map from blocks to the engines that have them. Every call costs O(1) per block that it is given."""

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        *,
        guess_timeout_s: float = GUESS_TIMEOUT_S,
    ) -> None:
        """Know nothing yet. clock: returns monotonic seconds"""
        self._max_bytes = max_bytes
        self._clock = clock
        self._guess_timeout_s = guess_timeout_s
        # With an odd number of shards the keys of one differ in their low bits, which choose the slot of a dictionary.
        num_shards = max(1, max_bytes * 13 // 16 // _SHARD_BYTES - 1) | 1
        self._shards: list[dict[int, HolderSet]] = [{} for _ in range(num_shards)]
        self._sets = HolderSets(max_bytes // 8)
        self._guesses: deque[_Guess] = deque()
        self._guess_bytes = 0
        self._max_guess_bytes = max_bytes // 32
        self._engines: dict[EngineKey, int] = {}
        """The blocks of each engine that has said how many it has."""
        self.stride = 1
        self.num_lookups = 0
        """Prompts that were looked up; the router counts them."""
        self.num_hits = 0
        """The prompts of which an engine had a prefix."""
        self._max_shard_blocks = 0
        self._slots: dict[EngineKey, int] = {}
        """The bit of each engine in holder sets."""
        self._names: dict[int, EngineKey] = {}
        """The engine of each bit that find() looks at, by the bit's position."""
        self._with_states: set[EngineKey] = set()
        """The engines that have a prefix up to a block that they report, whether or not they report those before it."""
        self._gone: dict[EngineKey, None] = {}
        """Engines that have left lately: a request that ends there brings no engine back."""
        self._snapshots: dict[EngineKey, int] = {}
        """The bits of engines whose snapshot comes in; find() does not look at these bits."""
        self._reporting = 0
        """The bits of engines that report their blocks."""
        self._live = 0
        """The bits that find() looks at."""
        self._retired = 0
        self._sweeping = 0
        self._next_swept = 0
        self._resize()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def size(self) -> PrefixIndexSize:
        """The size of the index. Costs some 0.1 ms."""
        num_blocks = len(self)
        shard_bytes = sum(map(sys.getsizeof, self._shards)) + 32 * num_blocks
        size_bytes = shard_bytes + self._sets.size_bytes + self._guess_bytes
        return PrefixIndexSize(num_blocks, size_bytes, self._max_bytes, self.stride)

    @property
    def has_states(self) -> bool:
        """Whether engines keep recurrent states, so that a prefix may be known whose beginning is not."""
        return bool(self._with_states)

    def note_engine(self, engine: EngineKey, num_blocks: int, *, has_states: bool = False) -> None:
        """Note how many blocks an engine has, so that the index is large enough, and whether it keeps states."""
        self._gone.pop(engine, None)
        if has_states:
            self._with_states.add(engine)
        num_blocks = min(num_blocks, MAX_ENGINE_BLOCKS)
        if self._engines.get(engine) != num_blocks:
            self._engines[engine] = num_blocks
            self._resize()

    def forget_engine(self, engine: EngineKey) -> None:
        """Forget what an engine has, because it has left. Its blocks are removed in slices by later calls."""
        self._gone[engine] = None
        self._with_states.discard(engine)
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
        for bits in (self._slots.pop(engine, 0), self._snapshots.pop(engine, 0)):
            self._retire(bits)
        if self._engines.pop(engine, None) is not None:
            self._resize()

    def add(self, engines: Iterable[EngineKey], block_hashes: Sequence[BlockHash]) -> None:
        """Guess that these engines have these blocks. block_hashes: of a prompt, beginning with its first block"""
        self.tidy()
        slots = 0
        for engine in engines:
            if engine not in self._with_states:
                slots |= self._slot_of(engine) | self._snapshots.get(engine, 0)
        keys = _keys_of(block_hashes[self.stride - 1 :: self.stride])
        if not slots or not len(keys):
            return
        guessed = slots & self._reporting

        def change(holders: HolderSet | None) -> HolderSet | None:
            if holders is None:
                return self._sets.take(slots, guessed)
            new = guessed & ~holders.engines
            return self._sets.take(holders.engines | slots, holders.guessed | new)

        # The last block is added first, so that a prefix is forgotten from its end.
        self._change(keys[::-1].tolist(), change, is_use=True)
        if guessed:
            self._guesses.append(_Guess(self._clock() + self._guess_timeout_s, guessed, keys))
            self._guess_bytes += _GUESS_BYTES + keys.nbytes

    def store(self, engine: EngineKey, keys: BlockKeys, positions: npt.NDArray[np.uint32]) -> None:
        """Note that an engine has reported these blocks. positions: of each in its prefix, in blocks from 0"""
        if engine not in self._with_states:
            keys = keys[(positions.astype(np.uint64) + np.uint64(1)) % np.uint64(self.stride) == 0]
        slot = self._written_slot(engine)

        def change(holders: HolderSet | None) -> HolderSet | None:
            if holders is None:
                return self._sets.take(slot, 0)
            return self._sets.take(holders.engines | slot, holders.guessed & ~slot)

        if slot:
            self._change((keys[::-1] & _KEY_MASK).tolist(), change)

    def discard(self, engine: EngineKey, keys: BlockKeys) -> None:
        """Note that an engine has reported that it has these blocks no longer."""
        slots = self._slots.get(engine, 0) | self._snapshots.get(engine, 0)
        self._change((keys & _KEY_MASK).tolist(), lambda holders: self._without(holders, slots))

    def begin_snapshot(self, engine: EngineKey) -> None:
        """Begin to take in all blocks of an engine. Until end_snapshot() find() knows what it knew before."""
        self._retire(self._snapshots.pop(engine, 0))
        if slot := self._free_slot():
            self._snapshots[engine] = slot
            self._reporting |= slot

    def end_snapshot(self, engine: EngineKey) -> None:
        """Replace what was known of an engine by what was reported since begin_snapshot()."""
        if slot := self._snapshots.pop(engine, 0):
            self._retire(self._slots.pop(engine, 0))
            self._slots[engine] = slot
            self._names[slot.bit_length()] = engine
            self._live |= slot

    def find(self, block_hashes: Sequence[BlockHash]) -> CachedPrefix:
        """Return how many of these blocks, from the first one on, each engine has, without engines that have none."""
        with_states = 0
        for engine in self._with_states:
            with_states |= self._slots.get(engine, 0)
        levels = [(num_blocks, slots) for num_blocks, slots in self._find(block_hashes, ~with_states) if slots]
        if with_states:
            levels = sorted([*levels, *self._find_last(block_hashes, with_states)])
        return CachedPrefix(levels, self._slots, self._names)

    def _find_last(self, block_hashes: Sequence[BlockHash], slots: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of blocks, and the bits, of those given, of the engines that have a state after so many."""
        left, keys = slots & self._live, _key_list(block_hashes)
        for num_blocks in range(len(keys), 0, -1):
            if not left:
                return
            key = keys[num_blocks - 1]
            holders = self._shards[key % len(self._shards)].get(key)
            if holders is not None and (found := left & holders.engines):
                left &= ~found
                yield num_blocks, found

    def _find(self, block_hashes: Sequence[BlockHash], slots: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of blocks, and the bits, of those given, of the engines that have so many and no more."""
        shards, num_shards, stride = self._shards, len(self._shards), self.stride
        left, last, num_found = self._live & slots, None, 0
        for key in _key_list(block_hashes[stride - 1 :: stride]):
            holders = shards[key % num_shards].get(key)
            if holders is not last or holders is None:
                last = holders
                kept = 0 if holders is None else left & holders.engines
                if kept != left:
                    if num_found:
                        yield num_found * stride, left & ~kept
                    left = kept
                    if not left:
                        return
            num_found += 1
        if num_found:
            yield num_found * stride, left

    def tidy(self) -> bool:
        """Go on with the removal of old guesses and of engines that left. Returns whether anything is left to do.

        One call takes about a millisecond, or five if a guess of the longest prompt is over.
        """
        self._drop_old_guess()
        if not self._sweeping:
            self._sweeping, self._next_swept = self._retired, 0
        num_visited = 0
        while self._sweeping and num_visited < _SLICE_BLOCKS:
            num_visited += 1 + self._sweep(self._shards[self._next_swept])
            self._next_swept += 1
            if self._next_swept == len(self._shards):
                # The bits may be used again: no block has them.
                self._retired &= ~self._sweeping
                self._reporting &= ~self._sweeping
                self._sweeping = 0
        return bool(self._retired)

    def _sweep(self, shard: dict[int, HolderSet]) -> int:
        slots = self._sweeping
        keys = [key for key, holders in shard.items() if holders.engines & slots]
        num_visited = len(shard)
        self._change(keys, lambda holders: self._without(holders, slots))
        return num_visited

    def _drop_old_guess(self) -> None:
        """Forget the oldest guess if its time is over, or if guesses take too much memory."""
        if not self._guesses:
            return
        oldest = self._guesses[0]
        if self._clock() < oldest.expires_s and self._guess_bytes <= self._max_guess_bytes:
            return
        self._guesses.popleft()
        self._guess_bytes -= _GUESS_BYTES + oldest.keys.nbytes

        def change(holders: HolderSet | None) -> HolderSet | None:
            return self._without(holders, 0 if holders is None else oldest.slots & holders.guessed)

        self._change(oldest.keys.tolist(), change)

    def _without(self, holders: HolderSet | None, slots: int) -> HolderSet | None:
        left = 0 if holders is None else holders.engines & ~slots
        return None if holders is None or not left else self._sets.take(left, holders.guessed & ~slots)

    def _change(
        self, keys: Iterable[int], change: Callable[[HolderSet | None], HolderSet | None], *, is_use: bool = False
    ) -> None:
        """Replace the holders of blocks.

        change: returns the new holders, taken once; None removes the block. It is called once for each old holder set
        is_use: whether the blocks are the most recently used ones now
        """
        shards, num_shards, sets, most = self._shards, len(self._shards), self._sets, self._max_shard_blocks
        changed: dict[HolderSet | None, HolderSet | None] = {}
        for key in keys:
            shard = shards[key % num_shards]
            old = shard.get(key)
            if old in changed:
                new = changed[old]
            else:
                # The use that change() takes lasts until the end of this call, so that the set stays the same object.
                new = changed[old] = change(old)
            if new is old and not (is_use and old is not None):
                continue
            if old is not None:
                del shard[key]
            if new is not None:
                new.num_uses += new is not old
                shard[key] = new
                if len(shard) > most:
                    oldest = next(iter(shard))
                    sets.release(shard.pop(oldest))
            if old is not None and new is not old:
                sets.release(old)
        for new in changed.values():
            if new is not None:
                sets.release(new)

    def _slot_of(self, engine: EngineKey) -> int:
        slot = self._slots.get(engine, 0)
        if not slot and engine not in self._gone and (slot := self._free_slot()):
            self._slots[engine] = slot
            self._names[slot.bit_length()] = engine
            self._live |= slot
        return slot

    def _written_slot(self, engine: EngineKey) -> int:
        return self._snapshots.get(engine, 0) or self._slot_of(engine)

    def _free_slot(self) -> int:
        """Return a bit that no block has; 0 if all are in use."""
        used = self._retired
        for slot in (*self._slots.values(), *self._snapshots.values()):
            used |= slot
        slot = ~used & (used + 1)
        return slot if slot.bit_length() <= _MAX_SLOTS else 0

    def _retire(self, slot: int) -> None:
        self._retired |= slot
        self._live &= ~slot
        self._names.pop(slot.bit_length(), None)

    def _resize(self) -> None:
        """Choose the stride and the number of blocks for the engines that are known."""
        num_shards = len(self._shards)
        # Shards fill unevenly: some have a tenth more blocks than the mean.
        num_fitting = int(num_shards * _SHARD_BLOCKS * 0.9)
        num_blocks = sum(self._engines.values()) or min(_UNKNOWN_NUM_BLOCKS, num_fitting)
        while num_blocks > self.stride * num_fitting:
            self.stride *= 2
        # Not until twice as many would fit: an engine that leaves for a while must not change the stride twice.
        while self._engines and self.stride > 1 and 2 * num_blocks <= self.stride // 2 * num_fitting:
            self.stride //= 2
        wanted = num_blocks / self.stride / num_shards * 1.25 + 16
        self._max_shard_blocks = min(_SHARD_BLOCKS, int(wanted))


def _keys_of(block_hashes: Sequence[BlockHash]) -> BlockKeys:
    return np.frombuffer(b"".join(block_hashes), "<u8")[::2] & _KEY_MASK


def _key_list(block_hashes: Sequence[BlockHash]) -> list[int]:
    if len(block_hashes) > _FEW:
        return list(_keys_of(block_hashes).tolist())
    return [int.from_bytes(block_hash[:8], "little") & _KEY_BITS for block_hash in block_hashes]
