"""Keeps each distinct set of engines that hold a block once, since blocks of a prompt mostly have the same holders."""

from __future__ import annotations

from dataclasses import dataclass

_OBJECTS_BYTES = 320
"""A set, its two integers without their digits, its key, and its part of the dictionary."""


@dataclass(slots=True, eq=False)
class HolderSet:
    """The engines that hold a block, as bits of engine slots. Equal sets are the same object.

    guessed:  those of the engines that were only sent a request with the block, and have not reported it
    num_uses: for how many blocks this set stands
    """

    engines: int
    guessed: int
    num_uses: int = 0


class HolderSets:
    """All holder sets in use; their memory is bounded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sets: dict[tuple[int, int], HolderSet] = {}
        self._num_slots = 0

    @property
    def size_bytes(self) -> int:
        """About how much memory the sets take, from above: all integers count as if they had the highest bit."""
        return len(self._sets) * self._set_bytes()

    def take(self, engines: int, guessed: int) -> HolderSet | None:
        """Return the set of these engines, with one more use. Returns None if there is no room for another set."""
        holders = self._sets.get((engines, guessed))
        if holders is None:
            self._num_slots = max(self._num_slots, engines.bit_length())
            # A set of one engine is always made: there are two for each slot at most.
            is_single = engines & (engines - 1) == 0
            if not is_single and self.size_bytes + self._set_bytes() > self._max_bytes:
                return None
            holders = self._sets[engines, guessed] = HolderSet(engines, guessed)
        holders.num_uses += 1
        return holders

    def release(self, holders: HolderSet) -> None:
        """Take a use away; a set without uses is forgotten."""
        holders.num_uses -= 1
        if not holders.num_uses:
            del self._sets[holders.engines, holders.guessed]

    def _set_bytes(self) -> int:
        # Python keeps 30 bits of an integer in 4 bytes.
        return _OBJECTS_BYTES + 2 * 4 * (self._num_slots // 30 + 1)
