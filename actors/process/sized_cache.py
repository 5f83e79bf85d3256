"""Defines a cache whose values are bounded by their size in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class SizedCache(Generic[KeyT, ValueT]):
    """A cache of limited size in bytes, which drops the values that were used least recently. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value of a key and count it as used now; None if the cache does not have the key."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Add a value, and drop others until there is room; a value that is larger than the limit is not kept.

        num_bytes: the value's size
        """
        if (old := self._entries.pop(key, None)) is not None:
            self._num_bytes -= old[1]
        self._entries[key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]
