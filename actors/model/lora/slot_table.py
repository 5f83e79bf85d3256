"""Keeps track of the adapter in each slot of a rank's layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet


class SlotTable:
    """Gives slots to the adapters of the next step; the least recently used adapters lose theirs."""

    def __init__(self, num_slots: int) -> None:
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, keys: AbstractSet[str]) -> tuple[dict[str, int], set[str]]:
        """Give each of a step's adapters a slot; returns the slots by adapter, and the adapters that got theirs now."""
        new = {key for key in keys if key not in self._slot_of}
        for key in keys - new:
            self._slot_of.move_to_end(key)
        for key in sorted(new):
            self._slot_of[key] = self._free.pop() if self._free else self._reclaim(keys)
        return {key: self._slot_of[key] for key in keys}, new

    def _reclaim(self, keys: AbstractSet[str]) -> int:
        victim = next((key for key in self._slot_of if key not in keys), None)
        assert victim is not None, "the scheduler let more adapters into a step than there are slots"
        return self._slot_of.pop(victim)

    def drop(self, key: str) -> None:
        """Free the slot of an adapter that was dropped, if it has one."""
        if (slot := self._slot_of.pop(key, None)) is not None:
            self._free.append(slot)
