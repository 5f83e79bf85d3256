from __future__ import annotations

import random

from actors.core.queue.removable_heap import RemovableHeap


def test_ids_come_in_their_order_and_equal_ones_by_id() -> None:
    heap: RemovableHeap[tuple[float]] = RemovableHeap()
    for request_id, order in (("c", 2.0), ("b", 1.0), ("a", 2.0)):
        heap.push(request_id, (order,))
    assert list(heap) == ["b", "a", "c"]
    assert heap.peek() == ((1.0,), "b")


def test_a_removed_id_is_never_seen_again() -> None:
    heap: RemovableHeap[tuple[float]] = RemovableHeap()
    heap.push("a", (1.0,))
    assert heap.remove("a")
    assert not heap.remove("a")
    assert heap.peek() is None
    assert len(heap) == 0


def test_an_id_that_is_pushed_again_has_only_its_new_place() -> None:
    heap: RemovableHeap[tuple[float]] = RemovableHeap()
    heap.push("a", (1.0,))
    heap.push("b", (2.0,))
    heap.push("a", (3.0,))
    assert list(heap) == ["b", "a"]
    assert heap.peek() == ((2.0,), "b")


def test_an_id_may_come_back_to_the_place_that_it_left() -> None:
    heap: RemovableHeap[tuple[float]] = RemovableHeap()
    heap.push("a", (1.0,))
    heap.remove("a")
    heap.push("a", (1.0,))
    heap.remove("a")
    assert heap.peek() is None


def test_it_agrees_with_a_sorted_list_and_keeps_few_tombstones() -> None:
    rng = random.Random(0)
    heap: RemovableHeap[tuple[int]] = RemovableHeap()
    model: dict[str, int] = {}
    for _ in range(5000):
        request_id, order = str(rng.randrange(200)), rng.randrange(50)
        if rng.random() < 0.6:
            assert heap.remove(request_id) == (model.pop(request_id, None) is not None)
        else:
            heap.push(request_id, (order,))
            model[request_id] = order
        first = min(((order, name) for name, order in model.items()), default=None)
        peeked = heap.peek()
        assert (None if peeked is None else (peeked[0][0], peeked[1])) == first
    assert len(heap) == len(model)
