"""How much of one prompt each engine has cached, without a look at every engine that has any of it.

A prompt's first block is often one that all prompts share, such as a system prompt's. Then every engine has it, and few
have more. So the engines are kept as bits of their slots in the prefix index, by how much they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cluster.routing.engine_connection import EngineKey


class CachedPrefix(Mapping[EngineKey, int]):
    """Maps each engine that has a prefix to its length. It tells what the index knew before its next change."""

    __slots__ = ("_levels", "_names", "_slots")

    def __init__(
        self,
        levels: Sequence[tuple[int, int]] = (),
        slots: Mapping[EngineKey, int] | None = None,
        names: Mapping[int, EngineKey] | None = None,
    ) -> None:
        """Take the index's answer.

        levels: lengths, the shortest first, each with the bits of the engines that have so much and no more
        slots:  the bit of each engine
        names:  the engine of each bit, by the bit's position; the lowest bit has position 1
        """
        self._levels = levels
        self._slots: Mapping[EngineKey, int] = {} if slots is None else slots
        self._names: Mapping[int, EngineKey] = {} if names is None else names

    @property
    def longest(self) -> int:
        """The length of the longest prefix; 0 if no engine has one."""
        return self._levels[-1][0] if self._levels else 0

    def times(self, factor: int) -> CachedPrefix:
        """Return the same with all lengths multiplied, as from blocks to tokens."""
        return CachedPrefix([(length * factor, bits) for length, bits in self._levels], self._slots, self._names)

    def but_for(self, lengths: Mapping[EngineKey, int]) -> CachedPrefix:
        """Return the same with other lengths for these engines. Engines that the index does not know are left out."""
        others = 0
        for engine in lengths:
            others |= self._slots.get(engine, 0)
        of_length = {length: bits & ~others for length, bits in self._levels}
        for engine, length in lengths.items():
            if length:
                of_length[length] = of_length.get(length, 0) | self._slots.get(engine, 0)
        return CachedPrefix(sorted(level for level in of_length.items() if level[1]), self._slots, self._names)

    def length_of(self, engine: EngineKey) -> int:
        """Return how much an engine has; 0 if it has nothing."""
        if not self._levels:
            return 0
        slot = self._slots.get(engine, 0)
        return next((length for length, bits in self._levels if bits & slot), 0)

    def longest_first(self, *, is_newest_first: bool = False) -> Iterator[tuple[EngineKey, int]]:
        """Yield engines with what they have, those with the longest prefixes first.

        is_newest_first: of engines with as much, those that the index came to know last come first
        """
        for length, level in reversed(self._levels):
            bits = level
            while bits:
                position = bits.bit_length() if is_newest_first else (bits & -bits).bit_length()
                bits ^= 1 << (position - 1)
                yield self._names[position], length

    def __getitem__(self, engine: EngineKey) -> int:
        if not (length := self.length_of(engine)):
            raise KeyError(engine)
        return length

    def __iter__(self) -> Iterator[EngineKey]:
        return (engine for engine, _ in self.longest_first())

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._levels)

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __repr__(self) -> str:
        return f"CachedPrefix({dict(self)})"
