"""The table of which adapter is in which slot of a rank's layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet


class SlotTable:
    """Slots go to the adapters of the step that is to be computed; who was longest in no step makes room."""

    def __init__(self, num_slots: int) -> None:
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, keys: AbstractSet[str]) -> tuple[dict[str, int], set[str]]:
        """Give each of a step's adapters a slot; returns these, and the adapters that are new in theirs."""
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
        """The adapter is gone; its slot is free."""
        if (slot := self._slot_of.pop(key, None)) is not None:
            self._free.append(slot)
