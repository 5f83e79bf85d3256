"""A heap whose entries can be taken out by id.

A removed entry stays in the heap as a tombstone until it comes to the top, or until tombstones are the majority.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

OrderT = TypeVar("OrderT", bound=tuple[float, ...])


class RemovableHeap(Generic[OrderT]):
    """Request ids in the order of (order, request id), the smallest first. Each id is in the heap at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderT, str]] = []
        self._order_of: dict[str, OrderT] = {}

    def __len__(self) -> int:
        return len(self._order_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._order_of

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids from the first to the last."""
        return iter(sorted(self._order_of, key=lambda request_id: (self._order_of[request_id], request_id)))

    def push(self, request_id: str, order: OrderT) -> None:
        """Add an id, or give an id that is here another order."""
        self.remove(request_id)
        self._order_of[request_id] = order
        heapq.heappush(self._heap, (order, request_id))

    def peek(self) -> tuple[OrderT, str] | None:
        """Return the first (order, id), or None if there is none."""
        while self._heap:
            order, request_id = self._heap[0]
            if self._order_of.get(request_id) == order:
                return order, request_id
            heapq.heappop(self._heap)
        return None

    def order_of(self, request_id: str) -> OrderT:
        """Return the order of an id. Raises KeyError if the heap does not have the id."""
        return self._order_of[request_id]

    def remove(self, request_id: str) -> bool:
        """Remove an id. Returns whether it was in the heap."""
        if self._order_of.pop(request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._order_of) + 64:
            self._heap = [(order, name) for name, order in self._order_of.items()]
            heapq.heapify(self._heap)
        return True
