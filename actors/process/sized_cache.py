"""A cache of values that were costly to make, bounded by their size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class SizedCache(Generic[KeyT, ValueT]):
    """Bounded by bytes. What was not used for longest goes first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value under a key, and count it as used now; None if it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Keep a value, and let go of others until there is room; one that is too large alone is not kept."""
        if (old := self._entries.pop(key, None)) is not None:
            self._num_bytes -= old[1]
        self._entries[key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]
